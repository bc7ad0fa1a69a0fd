#include "cadre/train/trainer/strategy/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/file_memory.h"

namespace cadre::train {
namespace {

// The gradient plus the decayed parameter, as in L2 regularization.
at::Tensor decayed(const at::Tensor& gradient, const at::Tensor& parameter, double weight_decay) {
  return weight_decay == 0 ? gradient : gradient.add(parameter, weight_decay);
}

// Adam, whose decay is added to the gradient and so enters the moments, and AdamW, whose decay is
// not.
class Adam final : public Optimizer {
 public:
  Adam(std::vector<TrainedTensor> parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const override {
    return {{"step", at::zeros({}, at::kFloat)},
            {"exp_avg", zeros_beside(parameter)},
            {"exp_avg_sq", zeros_beside(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool /*is_first*/) override {
    for (at::Tensor& step : batch.state["step"])
      step.add_(1);  // the kernel expects the incremented step
    run_fused_adam({batch.parameters,
                    batch.gradients,
                    {batch.state["exp_avg"], batch.state["exp_avg_sq"]},
                    batch.state["step"]},
                   {.learning_rate = hyper.learning_rate,
                    .beta1 = config_.beta1,
                    .beta2 = config_.beta2,
                    .weight_decay = hyper.weight_decay,
                    .epsilon = config_.epsilon,
                    .decoupled_decay = config_.kind == "adamw"},
                   TailRounding::kAsWholeVectors);
  }

  OptimizerConfig config_;
};

class Adagrad final : public Optimizer {
 public:
  Adagrad(std::vector<TrainedTensor> parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const override {
    return {{"step", at::zeros({}, at::kFloat)}, {"sum", zeros_beside(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool /*is_first*/) override {
    for (at::Tensor& step : batch.state["step"])
      step.add_(1);  // the kernel expects the incremented step
    run_fused({batch.parameters, batch.gradients, {batch.state["sum"]}, batch.state["step"]},
              TailRounding::kAsWholeVectors, [&](const FusedBatch& lists) {
                at::_fused_adagrad_(lists.parameters, lists.gradients, lists.states[0], lists.steps,
                                    hyper.learning_rate, config_.rate_decay, hyper.weight_decay,
                                    config_.epsilon, /*maximize=*/false);
              });
  }

  OptimizerConfig config_;
};

// Optimizers without a fused kernel in libtorch: one parameter after the other.
class RmsProp final : public Optimizer {
 public:
  RmsProp(std::vector<TrainedTensor> parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const override {
    std::vector<NamedTensor> state = {{"square_avg", zeros_beside(parameter)}};
    if (config_.momentum > 0) state.emplace_back("momentum_buffer", zeros_beside(parameter));
    return state;
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool /*is_first*/) override {
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      at::Tensor& parameter = batch.parameters[i];
      const at::Tensor gradient = decayed(batch.gradients[i], parameter, hyper.weight_decay);
      at::Tensor& square = batch.state["square_avg"][i];
      square.mul_(config_.alpha).addcmul_(gradient, gradient, 1 - config_.alpha);
      const at::Tensor divisor = square.sqrt().add_(config_.epsilon);
      if (config_.momentum > 0) {
        at::Tensor& buffer = batch.state["momentum_buffer"][i];
        buffer.mul_(config_.momentum).addcdiv_(gradient, divisor);
        parameter.add_(buffer, -hyper.learning_rate);
      } else {
        parameter.addcdiv_(gradient, divisor, -hyper.learning_rate);
      }
    }
  }

  OptimizerConfig config_;
};

// Source: Zeiler, "ADADELTA: an adaptive learning rate method", 2012, with the learning rate that
// PyTorch has added; libtorch has no Adadelta in C++.
class Adadelta final : public Optimizer {
 public:
  Adadelta(std::vector<TrainedTensor> parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const override {
    return {{"square_avg", zeros_beside(parameter)}, {"acc_delta", zeros_beside(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool /*is_first*/) override {
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      at::Tensor& parameter = batch.parameters[i];
      const at::Tensor gradient = decayed(batch.gradients[i], parameter, hyper.weight_decay);
      at::Tensor& square = batch.state["square_avg"][i];
      at::Tensor& accumulated = batch.state["acc_delta"][i];
      square.mul_(config_.rho).addcmul_(gradient, gradient, 1 - config_.rho);
      const at::Tensor divisor = square.add(config_.epsilon).sqrt_();
      const at::Tensor delta =
          accumulated.add(config_.epsilon).sqrt_().div_(divisor).mul_(gradient);
      accumulated.mul_(config_.rho).addcmul_(delta, delta, 1 - config_.rho);
      parameter.add_(delta, -hyper.learning_rate);
    }
  }

  OptimizerConfig config_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<TrainedTensor> parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const override {
    if (config_.momentum == 0) return {};
    return {{"momentum_buffer", zeros_beside(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool is_first) override {
    FusedBatch lists = {batch.parameters, batch.gradients, {}, {}};
    if (config_.momentum != 0) lists.states.push_back(batch.state["momentum_buffer"]);
    run_fused_sgd(lists,
                  {.learning_rate = hyper.learning_rate,
                   .momentum = config_.momentum,
                   .weight_decay = hyper.weight_decay,
                   .nesterov = config_.nesterov,
                   .is_first_step = is_first},
                  TailRounding::kAsWholeVectors);
  }

  std::span<const at::ScalarType> dtypes() const override { return kSgdDtypes; }

  OptimizerConfig config_;
};

}  // namespace

std::vector<TrainedTensor> trained_tensors(const std::vector<NamedTensor>& parameters) {
  std::vector<TrainedTensor> trained;
  for (const auto& [name, tensor] : parameters)
    trained.push_back({name, tensor, tensor.dim() >= 2});
  return trained;
}

Optimizer::Optimizer(std::vector<TrainedTensor> parameters, double weight_decay)
    : parameters_(std::move(parameters)), weight_decay_(weight_decay), state_(parameters_.size()) {}

void Optimizer::step(double learning_rate) {
  const at::NoGradGuard no_grad;
  // Grouped by (decayed, first step), which are arguments of a kernel call.
  std::array<std::array<Batch, 2>, 2> batches;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (!parameter.grad().defined()) continue;
    at::Tensor gradient = checked_gradient(i);
    const bool is_first = state_[i].empty();
    if (is_first) make_state(i);
    Batch& batch = batches[parameters_[i].is_decayed ? 1 : 0][is_first ? 1 : 0];
    batch.parameters.push_back(parameter);
    batch.gradients.push_back(std::move(gradient));
    for (const auto& [name, tensor] : state_[i]) batch.state[name].push_back(tensor);
  }
  for (const bool is_decayed : {false, true}) {
    for (const bool is_first : {false, true}) {
      Batch& batch = batches[is_decayed ? 1 : 0][is_first ? 1 : 0];
      if (batch.parameters.empty()) continue;
      update(batch, {learning_rate, is_decayed ? weight_decay_ : 0.0}, is_first);
    }
  }
}

void Optimizer::zero_grad() {
  for (const TrainedTensor& trained : parameters_) trained.tensor.mutable_grad().reset();
}

at::Tensor Optimizer::checked_gradient(size_t index) const {
  const auto& [name, parameter, is_decayed] = parameters_[index];
  const ParameterPlace place = {"optimizer", index, name};
  check_parameter(parameter, place, dtypes());
  check_gradient(parameter, parameter.grad(), place);
  return in_order_of(parameter, parameter.grad());
}

void Optimizer::make_state(size_t index) {
  for (auto& [key, tensor] : initial_state(parameters_[index].tensor)) {
    state_[index].emplace(key, tensor);
  }
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const auto& [key, tensor] : state_[i]) {
      named.emplace_back(cadre::format("{}.{}", parameters_[i].name, key), tensor);
    }
  }
  return named;
}

// What does not fit was saved with other settings: digests detect damage before.
void Optimizer::load_state(const std::vector<NamedTensor>& state) {
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : state) by_name.emplace(name, tensor);
  std::vector<std::map<std::string, at::Tensor>> loaded(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter, is_decayed] = parameters_[i];
    std::string missing;
    for (auto& [key, tensor] : initial_state(parameter)) {
      const std::string full_name = cadre::format("{}.{}", name, key);
      const auto found = by_name.find(full_name);
      if (found == by_name.end()) {
        missing = full_name;
        continue;
      }
      if (found->second.sizes() != tensor.sizes() || found->second.dtype() != tensor.dtype()) {
        throw Error(ErrorCode::kInvalidArgument,
                    cadre::format("optimizer state {} does not have the shape and dtype of {}",
                                  full_name, name));
      }
      loaded[i].emplace(key, tensor.copy_(found->second));
      by_name.erase(found);
    }
    // A parameter without a gradient so far has no state, and otherwise all of it.
    if (!loaded[i].empty() && !missing.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("optimizer state {}, which this optimizer needs, is not in the "
                                "snapshot",
                                missing));
    }
  }
  if (!by_name.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("optimizer state {}: this optimizer has no such parameter or state",
                              by_name.begin()->first));
  }
  state_ = std::move(loaded);
}

std::unique_ptr<Optimizer> make_optimizer(std::vector<TrainedTensor> parameters,
                                          const OptimizerConfig& config) {
  if (config.kind == "sgd") return std::make_unique<Sgd>(std::move(parameters), config);
  if (config.kind == "adagrad") return std::make_unique<Adagrad>(std::move(parameters), config);
  if (config.kind == "rmsprop") return std::make_unique<RmsProp>(std::move(parameters), config);
  if (config.kind == "adadelta") return std::make_unique<Adadelta>(std::move(parameters), config);
  return std::make_unique<Adam>(std::move(parameters), config);
}

}  // namespace cadre::train
