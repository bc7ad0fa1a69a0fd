#include "cadre/tensor/optim/optimizers.h"

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/tensor/optim/fused_kernels.h"
#include "cadre/tensor/optim/rule_step.h"
#include "cadre/tensor/optim/saved_part.h"

namespace cadre {
namespace {

using optim_state::NamedState;

// The update rule of AdamW and Adam. A rule (rule_step.h) lists the state tensors that the options
// need and calls the fused kernel.
template <typename RuleOptions, typename RuleState, bool kDecoupledDecay>
struct AdamRule {
  using Options = RuleOptions;
  using State = RuleState;
  static constexpr std::span<const at::ScalarType> kDtypes = kFloatingDtypes;

  static std::vector<NamedState> states(State& state, const Options& options) {
    std::vector<NamedState> named = {{"exp_avg", &state.exp_avg()},
                                     {"exp_avg_sq", &state.exp_avg_sq()}};
    if (options.amsgrad()) named.push_back({"max_exp_avg_sq", &state.max_exp_avg_sq()});
    return named;
  }

  static void run(const FusedBatch& batch, const Options& options, bool /*is_first_step*/) {
    const auto [beta1, beta2] = options.betas();
    run_fused_adam(batch,
                   {.learning_rate = options.lr(),
                    .beta1 = beta1,
                    .beta2 = beta2,
                    .weight_decay = options.weight_decay(),
                    .epsilon = options.eps(),
                    .amsgrad = options.amsgrad(),
                    .decoupled_decay = kDecoupledDecay},
                   TailRounding::kAsWholeVectors);
  }
};

struct AdamWRule : AdamRule<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true> {
  static constexpr std::string_view kName = "cadre::AdamW";
};

struct PlainAdamRule : AdamRule<torch::optim::AdamOptions, torch::optim::AdamParamState, false> {
  static constexpr std::string_view kName = "cadre::Adam";
};

struct SgdRule {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr std::string_view kName = "cadre::SGD";
  static constexpr std::span<const at::ScalarType> kDtypes = kSgdDtypes;

  static std::vector<NamedState> states(State& state, const Options& options) {
    if (options.momentum() == 0) return {};
    return {{"momentum_buffer", &state.momentum_buffer()}};
  }

  static void run(const FusedBatch& batch, const Options& options, bool is_first_step) {
    run_fused_sgd(batch,
                  {.learning_rate = options.lr(),
                   .momentum = options.momentum(),
                   .dampening = options.dampening(),
                   .weight_decay = options.weight_decay(),
                   .nesterov = options.nesterov(),
                   .is_first_step = is_first_step},
                  TailRounding::kAsWholeVectors);
  }
};

struct AdagradRule {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr std::string_view kName = "cadre::Adagrad";
  static constexpr std::span<const at::ScalarType> kDtypes = kFloatingDtypes;

  static std::vector<NamedState> states(State& state, const Options& /*options*/) {
    return {{"sum", &state.sum()}};
  }
  static double initial_value(const Options& options) {
    return options.initial_accumulator_value();
  }

  static void run(const FusedBatch& batch, const Options& options, bool /*is_first_step*/) {
    run_fused_adagrad(batch,
                      {.learning_rate = options.lr(),
                       .rate_decay = options.lr_decay(),
                       .weight_decay = options.weight_decay(),
                       .epsilon = options.eps()},
                      TailRounding::kAsWholeVectors);
  }
};

}  // namespace

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             torch::optim::AdamWOptions defaults)
    : torch::optim::AdamW(optim_state::checked_groups<AdamWRule>(groups), std::move(defaults)) {}

AdamW::AdamW(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults)
    : torch::optim::AdamW(std::move(parameters), std::move(defaults)) {}

AdamW::AdamW(const NamedParameters& named_parameters, torch::optim::AdamWOptions options)
    : torch::optim::AdamW(named_parameters.values(), std::move(options)),
      names_(optim_state::names_of(named_parameters)) {}

void AdamW::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  optim_state::check_given_options<AdamWRule>(group, param_groups().size());
  Optimizer::add_param_group(group);
}

at::Tensor AdamW::step(LossClosure closure) {
  return optim_state::take_step<AdamWRule>(*this, names_, closure);
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::AdamW::save(archive);
  optim_state::write_part(archive, param_groups());
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  optim_state::check_part(archive, param_groups(), AdamWRule::kName,
                          optim_state::PartRule::kIfWritten);
  optim_state::load_whole<AdamWRule>(*this, names_, [&] { torch::optim::AdamW::load(archive); });
}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           torch::optim::AdamOptions defaults)
    : torch::optim::Adam(optim_state::checked_groups<PlainAdamRule>(groups), std::move(defaults)) {}

Adam::Adam(std::vector<at::Tensor> parameters, torch::optim::AdamOptions defaults)
    : torch::optim::Adam(std::move(parameters), std::move(defaults)) {}

Adam::Adam(const NamedParameters& named_parameters, torch::optim::AdamOptions options)
    : torch::optim::Adam(named_parameters.values(), std::move(options)),
      names_(optim_state::names_of(named_parameters)) {}

void Adam::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  optim_state::check_given_options<PlainAdamRule>(group, param_groups().size());
  Optimizer::add_param_group(group);
}

at::Tensor Adam::step(LossClosure closure) {
  return optim_state::take_step<PlainAdamRule>(*this, names_, closure);
}

void Adam::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::Adam::save(archive);
  optim_state::write_part(archive, param_groups());
}

void Adam::load(torch::serialize::InputArchive& archive) {
  optim_state::check_part(archive, param_groups(), PlainAdamRule::kName,
                          optim_state::PartRule::kIfWritten);
  optim_state::load_whole<PlainAdamRule>(*this, names_, [&] { torch::optim::Adam::load(archive); });
}

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
         torch::optim::SGDOptions defaults)
    : torch::optim::SGD(optim_state::checked_groups<SgdRule>(groups), std::move(defaults)) {}

SGD::SGD(std::vector<at::Tensor> parameters, torch::optim::SGDOptions defaults)
    : torch::optim::SGD(std::move(parameters), std::move(defaults)) {}

SGD::SGD(const NamedParameters& named_parameters, torch::optim::SGDOptions options)
    : torch::optim::SGD(named_parameters.values(), std::move(options)),
      names_(optim_state::names_of(named_parameters)) {}

void SGD::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  optim_state::check_given_options<SgdRule>(group, param_groups().size());
  Optimizer::add_param_group(group);
}

at::Tensor SGD::step(LossClosure closure) {
  return optim_state::take_step<SgdRule>(*this, names_, closure);
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGD::save(archive);
  optim_state::write_part(archive, param_groups());
}

void SGD::load(torch::serialize::InputArchive& archive) {
  optim_state::check_part(archive, param_groups(), SgdRule::kName,
                          optim_state::PartRule::kIfWritten);
  optim_state::load_whole<SgdRule>(*this, names_, [&] { torch::optim::SGD::load(archive); });
}

// The base class gets no parameters, because the constructor of torch::optim::Adagrad would create
// the state of all of them at once, in memory.
Adagrad::Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 torch::optim::AdagradOptions defaults)
    : torch::optim::Adagrad(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)) {
  for (const auto& group : groups) add_param_group(group);
}

Adagrad::Adagrad(std::vector<at::Tensor> parameters, torch::optim::AdagradOptions defaults)
    : Adagrad({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

Adagrad::Adagrad(const NamedParameters& named_parameters, torch::optim::AdagradOptions options)
    : Adagrad(named_parameters.values(), std::move(options)) {
  names_ = optim_state::names_of(named_parameters);
}

void Adagrad::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  optim_state::check_given_options<AdagradRule>(group, param_groups().size());
  Optimizer::add_param_group(group);
}

at::Tensor Adagrad::step(LossClosure closure) {
  return optim_state::take_step<AdagradRule>(*this, names_, closure);
}

void Adagrad::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::Adagrad::save(archive);
  optim_state::write_part(archive, param_groups());
}

void Adagrad::load(torch::serialize::InputArchive& archive) {
  optim_state::check_part(archive, param_groups(), AdagradRule::kName,
                          optim_state::PartRule::kIfWritten);
  optim_state::load_whole<AdagradRule>(*this, names_,
                                       [&] { torch::optim::Adagrad::load(archive); });
}

}  // namespace cadre
