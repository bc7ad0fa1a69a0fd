// Makes the optimizer that a configuration names: one of Cadre's, or RMSprop of torch::optim.
//
// Threads: plain functions. Lifetime: an optimizer shares the parameters. Errors: those of the
// optimizers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/train/trainer/config/config.h"

namespace torch::nn {
class Module;
}

namespace cadre::train {

// The choice of the optimizer of a run.
struct OptimizerChoice {
  // `model` is the plain model, before it is divided or wrapped.
  OptimizerChoice(const OptimizerConfig& given, const torch::nn::Module& model);

  OptimizerConfig config;
  // The names of the parameters to which weight decay applies: those with two or more dimensions,
  // so neither biases nor parameters of norms.
  std::set<std::string> decayed;
};

// The parameters that an optimizer updates. Weight decay applies only to the first list.
struct SteppedParameters {
  std::vector<at::Tensor> decayed;
  std::vector<at::Tensor> others;

  void add(const at::Tensor& parameter, bool is_decayed) {
    (is_decayed ? decayed : others).push_back(parameter);
  }
  // Returns the device of all parameters; the CPU if there are none.
  c10::Device device() const {
    if (!decayed.empty()) return decayed.front().device();
    return others.empty() ? c10::Device(c10::DeviceType::CPU) : others.front().device();
  }
};
SteppedParameters stepped_parameters(const std::vector<ParameterShard>& shards,
                                     const OptimizerChoice& choice);

// Returns parameter groups in which every option is set. torch::optim replaces an option that
// equals the default of its class by the default of the optimizer, so the optimizer must have the
// defaults of the class.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const SteppedParameters& parameters,
                                                         const Options& options) {
  auto without_decay = std::make_unique<Options>(options);
  without_decay->weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(parameters.decayed, std::make_unique<Options>(options));
  groups.emplace_back(parameters.others, std::move(without_decay));
  return groups;
}

// Calls make(std::type_identity<O>(), options), where O is the optimizer class of the configuration
// for parameters on `device`. Only the state of parameters on the CPU can be offloaded.
template <typename Make>
auto with_optimizer(const OptimizerConfig& config, const c10::Device& device, const Make& make) {
  using OffloadedRmsProp = OffloadedOptimizer<torch::optim::RMSprop>;
  const double rate = config.learning_rate;
  const auto decayed = [&config](auto options) {
    options.weight_decay(config.weight_decay);
    return options;
  };
  const auto of_adam = [&config](auto options) {
    options.betas({config.beta1, config.beta2}).eps(config.epsilon);
    return options;
  };
  if (config.kind == "sgd") {
    return make(
        std::type_identity<SGD>(),
        decayed(
            torch::optim::SGDOptions(rate).momentum(config.momentum).nesterov(config.nesterov)));
  }
  if (config.kind == "adagrad") {
    return make(
        std::type_identity<Adagrad>(),
        decayed(
            torch::optim::AdagradOptions(rate).lr_decay(config.rate_decay).eps(config.epsilon)));
  }
  if (config.kind == "rmsprop") {
    const auto options = decayed(torch::optim::RMSpropOptions(rate)
                                     .alpha(config.alpha)
                                     .eps(config.epsilon)
                                     .momentum(config.momentum));
    return device.is_cpu() ? make(std::type_identity<OffloadedRmsProp>(), options)
                           : make(std::type_identity<torch::optim::RMSprop>(), options);
  }
  if (config.kind == "adadelta") {
    return make(std::type_identity<Adadelta>(),
                decayed(AdadeltaOptions(rate).rho(config.rho).eps(config.epsilon)));
  }
  if (config.kind == "adam") {
    return make(std::type_identity<Adam>(), of_adam(decayed(torch::optim::AdamOptions(rate))));
  }
  return make(std::type_identity<AdamW>(), of_adam(decayed(torch::optim::AdamWOptions(rate))));
}

// Makes an optimizer for a single process, or for shards that are divided in no further way.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const SteppedParameters& parameters,
                                                        const OptimizerConfig& config);
// Makes an optimizer for whole parameters.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<NamedTensor>& parameters,
                                                        const OptimizerConfig& config);

// Sets the learning rate of all groups.
void set_learning_rate(torch::optim::Optimizer& optimizer, double learning_rate);

}  // namespace cadre::train
