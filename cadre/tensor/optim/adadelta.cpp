// Implements Adadelta, which PyTorch has in Python only. Its options and state classes are modelled
// on those of torch::optim. It updates one parameter after the other, because there is no fused
// kernel.
#include <torch/optim/serialize.h>

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/tensor/optim/fused_kernels.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/rule_step.h"
#include "cadre/tensor/optim/saved_part.h"

namespace cadre {
namespace {

struct AdadeltaRule {
  using Options = AdadeltaOptions;
  using State = AdadeltaParamState;
  static constexpr std::string_view kName = "cadre::Adadelta";
  static constexpr std::span<const at::ScalarType> kDtypes = kFloatingDtypes;

  static std::vector<optim_state::NamedState> states(State& state, const Options& /*options*/) {
    return {{"square_avg", &state.square_avg()}, {"acc_delta", &state.acc_delta()}};
  }

  static void run(const FusedBatch& batch, const Options& options, bool /*is_first_step*/) {
    const double rho = options.rho();
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const at::Tensor& parameter = batch.parameters[i];
      const at::Tensor& square = batch.states[0][i];
      const at::Tensor& accumulated = batch.states[1][i];
      const at::Tensor gradient = options.weight_decay() == 0
                                      ? batch.gradients[i]
                                      : batch.gradients[i].add(parameter, options.weight_decay());
      square.mul_(rho).addcmul_(gradient, gradient, 1 - rho);
      const at::Tensor divisor = square.add(options.eps()).sqrt_();
      const at::Tensor delta = accumulated.add(options.eps()).sqrt_().div_(divisor).mul_(gradient);
      accumulated.mul_(rho).addcmul_(delta, delta, 1 - rho);
      parameter.add_(delta, -options.lr());
    }
  }
};

}  // namespace

AdadeltaOptions::AdadeltaOptions(double lr) : lr_(lr) {}

void AdadeltaOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, rho);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void AdadeltaOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(rho);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void AdadeltaParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, square_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, acc_delta);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
}

void AdadeltaParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(square_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(acc_delta);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
}

Adadelta::Adadelta(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   AdadeltaOptions defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                std::make_unique<AdadeltaOptions>(defaults)) {
  TORCH_CHECK_VALUE(defaults.lr() >= 0, "Invalid learning rate: ", defaults.lr());
  TORCH_CHECK_VALUE(0 <= defaults.rho() && defaults.rho() <= 1,
                    "Invalid rho value: ", defaults.rho());
  TORCH_CHECK_VALUE(defaults.eps() >= 0, "Invalid epsilon value: ", defaults.eps());
  TORCH_CHECK_VALUE(defaults.weight_decay() >= 0,
                    "Invalid weight_decay value: ", defaults.weight_decay());
  for (const torch::optim::OptimizerParamGroup& group : groups) add_param_group(group);
}

Adadelta::Adadelta(std::vector<at::Tensor> parameters, AdadeltaOptions defaults)
    : Adadelta({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

Adadelta::Adadelta(const NamedParameters& named_parameters, AdadeltaOptions options)
    : Adadelta(named_parameters.values(), std::move(options)) {
  names_ = optim_state::names_of(named_parameters);
}

void Adadelta::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  optim_state::check_given_options<AdadeltaRule>(group, param_groups().size());
  Optimizer::add_param_group(group);
  // Sets the group's options again: the base class keeps only options of torch::optim's own classes
  // and replaces others by the defaults.
  if (group.has_options()) param_groups().back().set_options(group.options().clone());
}

at::Tensor Adadelta::step(LossClosure closure) {
  return optim_state::take_step<AdadeltaRule>(*this, names_, closure);
}

void Adadelta::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdadeltaParamState, AdadeltaOptions>(archive, *this);
  optim_state::write_part(archive, param_groups());
}

void Adadelta::load(torch::serialize::InputArchive& archive) {
  optim_state::check_part(archive, param_groups(), AdadeltaRule::kName,
                          optim_state::PartRule::kIfWritten);
  optim_state::load_whole<AdadeltaRule>(*this, names_, [&] {
    torch::optim::serialize<AdadeltaParamState, AdadeltaOptions>(archive,
                                                                 static_cast<Optimizer&>(*this));
  });
}

}  // namespace cadre
