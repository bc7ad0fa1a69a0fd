#include "cadre/train/trainer/strategy/optimizer.h"

#include <torch/nn/module.h>

namespace cadre::train {
namespace {

// The class that computes the same on any device: that of torch::optim, if there is one. Cadre's
// kernels are those of the CPU. Both have the same state.
template <typename O>
struct PlainOptimizer {
  using Type = O;
};
template <>
struct PlainOptimizer<AdamW> {
  using Type = torch::optim::AdamW;
};
template <>
struct PlainOptimizer<Adam> {
  using Type = torch::optim::Adam;
};
template <>
struct PlainOptimizer<SGD> {
  using Type = torch::optim::SGD;
};
template <>
struct PlainOptimizer<Adagrad> {
  using Type = torch::optim::Adagrad;
};
template <>
struct PlainOptimizer<OffloadedOptimizer<torch::optim::RMSprop>> {
  using Type = torch::optim::RMSprop;
};

}  // namespace

OptimizerChoice::OptimizerChoice(const OptimizerConfig& given, const torch::nn::Module& model)
    : config(given) {
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() >= 2) decayed.insert(parameter.key());
  }
}

// No model of the trainer registers a tensor twice, so each parameter occurs once in the list.
SteppedParameters stepped_parameters(const torch::nn::Module& module,
                                     const OptimizerChoice& choice) {
  SteppedParameters stepped;
  for (const auto& parameter : module.named_parameters()) {
    stepped.add(parameter.value(), choice.decayed.contains(parameter.key()));
  }
  return stepped;
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
  const bool is_on_device = !parameters.is_on_cpu();
  return with_optimizer(
      config,
      [&]<typename O, typename Options>(std::type_identity<O>, const Options& options)
          -> std::unique_ptr<torch::optim::Optimizer> {
        using Plain = typename PlainOptimizer<O>::Type;
        if (is_on_device) {
          return std::make_unique<Plain>(groups_of(parameters, options), Options(options.lr()));
        }
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
