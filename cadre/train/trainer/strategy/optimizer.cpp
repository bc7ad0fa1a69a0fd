#include "cadre/train/trainer/strategy/optimizer.h"

#include <torch/nn/module.h>

namespace cadre::train {

OptimizerChoice::OptimizerChoice(const OptimizerConfig& given, const torch::nn::Module& model)
    : config(given) {
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() >= 2) decayed.insert(parameter.key());
  }
}

SteppedParameters stepped_parameters(const std::vector<ParameterShard>& shards,
                                     const OptimizerChoice& choice) {
  SteppedParameters stepped;
  for (const ParameterShard& shard : shards) {
    stepped.add(shard.values, choice.decayed.contains(shard.name));
  }
  return stepped;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const SteppedParameters& parameters,
                                                        const OptimizerConfig& config) {
  return with_optimizer(
      config, parameters.device(),
      [&]<typename O, typename Options>(std::type_identity<O>, const Options& options)
          -> std::unique_ptr<torch::optim::Optimizer> {
        return std::make_unique<O>(groups_of(parameters, options), Options(options.lr()));
      });
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<NamedTensor>& parameters,
                                                        const OptimizerConfig& config) {
  SteppedParameters stepped;
  for (const NamedTensor& parameter : parameters) {
    stepped.add(parameter.tensor, parameter.tensor.dim() >= 2);
  }
  return make_optimizer(stepped, config);
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double learning_rate) {
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    group.options().set_lr(learning_rate);
  }
}

}  // namespace cadre::train
