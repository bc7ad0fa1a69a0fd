#include "cadre/train/optimizer.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

#include <array>

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre::train {
namespace {

// torch's guard against a division by a norm of zero.
constexpr double kNormEpsilon = 1e-6;

class AdamW final : public Optimizer {
 public:
  AdamW(NamedTensors parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  NamedTensors initial_state(const at::Tensor& parameter) const override {
    return {{"step", torch::zeros({}, torch::kFloat32)},
            {"exp_avg", torch::zeros_like(parameter)},
            {"exp_avg_sq", torch::zeros_like(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool /*is_first*/) override {
    for (at::Tensor& step : batch.state["step"]) step.add_(1);  // the kernel expects it done
    at::_fused_adamw_(batch.parameters, batch.gradients, batch.state["exp_avg"],
                      batch.state["exp_avg_sq"], /*max_exp_avg_sqs=*/{}, batch.state["step"],
                      hyper.learning_rate, config_.beta1, config_.beta2, hyper.weight_decay,
                      config_.epsilon, /*amsgrad=*/false, /*maximize=*/false);
  }

  OptimizerConfig config_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(NamedTensors parameters, const OptimizerConfig& config)
      : Optimizer(std::move(parameters), config.weight_decay), config_(config) {}

 private:
  NamedTensors initial_state(const at::Tensor& parameter) const override {
    if (config_.momentum == 0) return {};
    return {{"momentum_buffer", torch::zeros_like(parameter)}};
  }

  void update(Batch& batch, const Hyperparameters& hyper, bool is_first) override {
    at::_fused_sgd_(batch.parameters, batch.gradients, batch.state["momentum_buffer"],
                    hyper.weight_decay, config_.momentum, hyper.learning_rate, /*dampening=*/0,
                    config_.nesterov, /*maximize=*/false, is_first);
  }

  OptimizerConfig config_;
};

}  // namespace

Optimizer::Optimizer(NamedTensors parameters, double weight_decay)
    : parameters_(std::move(parameters)), weight_decay_(weight_decay), state_(parameters_.size()) {}

void Optimizer::step(double learning_rate) {
  const torch::NoGradGuard no_grad;
  // By (decayed, first step): what one kernel call has in common.
  std::array<std::array<Batch, 2>, 2> batches;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].second;
    if (!parameter.grad().defined()) continue;
    const bool is_first = state_[i].empty();
    if (is_first) make_state(i);
    Batch& batch = batches[parameter.dim() >= 2 ? 1 : 0][is_first ? 1 : 0];
    batch.parameters.push_back(parameter);
    batch.gradients.push_back(checked_gradient(i));
    for (const auto& [name, tensor] : state_[i]) batch.state[name].push_back(tensor);
  }
  for (const bool is_decayed : {false, true}) {
    for (const bool is_first : {false, true}) {
      Batch& batch = batches[is_decayed ? 1 : 0][is_first ? 1 : 0];
      if (batch.parameters.empty()) continue;
      update(batch, {learning_rate, is_decayed ? weight_decay_ : 0.0}, is_first);
      for (const at::Tensor& parameter : batch.parameters) {
        torch::autograd::impl::bump_version(parameter);
      }
    }
  }
}

void Optimizer::zero_grad() {
  for (const auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
}

at::Tensor Optimizer::checked_gradient(size_t index) const {
  const auto& [name, parameter] = parameters_[index];
  const at::Tensor gradient = parameter.grad();
  if (gradient.layout() != at::kStrided || gradient.scalar_type() != parameter.scalar_type()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("optimizer: the gradient of {} is {} {}; expected dense {}, as the "
                              "parameter",
                              name, c10::toString(gradient.scalar_type()),
                              gradient.layout() == at::kStrided ? "dense" : "sparse",
                              c10::toString(parameter.scalar_type())));
  }
  if (gradient.strides() == parameter.strides()) return gradient;
  // The kernel walks memory, not indices: it needs the parameter's own order.
  return torch::empty_like(parameter).copy_(gradient);
}

void Optimizer::make_state(size_t index) {
  const auto& [name, parameter] = parameters_[index];
  if (!parameter.is_non_overlapping_and_dense()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("optimizer: {} is a view with gaps; expected dense memory", name));
  }
  for (auto& [key, tensor] : initial_state(parameter)) state_[index].emplace(key, tensor);
}

NamedTensors Optimizer::state() const {
  NamedTensors named;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const auto& [key, tensor] : state_[i]) {
      named.emplace_back(cadre::format("{}.{}", parameters_[i].first, key), tensor);
    }
  }
  return named;
}

void Optimizer::load_state(const NamedTensors& state) {
  std::map<std::string, at::Tensor> by_name(state.begin(), state.end());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    std::map<std::string, at::Tensor> loaded;
    for (auto& [key, tensor] : initial_state(parameter)) {
      const auto found = by_name.find(cadre::format("{}.{}", name, key));
      if (found == by_name.end()) continue;
      if (found->second.sizes() != tensor.sizes() || found->second.dtype() != tensor.dtype()) {
        throw Error(ErrorCode::kCorruption,
                    cadre::format("optimizer state {} does not have the shape and dtype of {}",
                                  found->first, name));
      }
      loaded.emplace(key, tensor.copy_(found->second));
      by_name.erase(found);
    }
    // A parameter without a gradient so far has no state at all; half a state is damage.
    if (!loaded.empty() && loaded.size() != initial_state(parameter).size()) {
      throw Error(ErrorCode::kCorruption,
                  cadre::format("optimizer state of {} is incomplete", name));
    }
    state_[i] = std::move(loaded);
  }
  if (!by_name.empty()) {
    throw Error(ErrorCode::kCorruption,
                cadre::format("optimizer state {} belongs to no parameter of this optimizer",
                              by_name.begin()->first));
  }
}

std::unique_ptr<Optimizer> make_optimizer(NamedTensors parameters, const OptimizerConfig& config) {
  if (config.kind == "sgd") return std::make_unique<Sgd>(std::move(parameters), config);
  return std::make_unique<AdamW>(std::move(parameters), config);
}

double clip_gradient_norm(const NamedTensors& parameters, double max_norm) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (gradients.empty()) return 0;
  const double norm =
      torch::stack(at::_foreach_norm(gradients)).to(torch::kFloat64).norm().item<double>();
  if (max_norm > 0 && norm > max_norm) {
    at::_foreach_mul_(gradients, max_norm / (norm + kNormEpsilon));
  }
  return norm;
}

}  // namespace cadre::train
