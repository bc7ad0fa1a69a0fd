// Divides an optimizer O among ranks (ZeRO stage 1 and 2): each rank has the optimizer state of its
// shard of the parameters and updates only that shard; then the ranks all_gather the parameters.
// docs/guide/parallel/zero.md shows programs.
//
// Threads: one. Blocking: the constructor, step(), wait(), add_param_group(), state_dict(),
// load_state_dict() and load() are collectives and wait until the group's deadline. All ranks call
// them in the same order. Lifetime: shares the parameters and the group. The destructor waits for
// the gathers of the last step; the parameters keep their values. The methods of an optimizer that
// was moved from throw kInvalidArgument. Errors: cadre::Error. If a check fails on one rank in the
// constructor or before a step, all ranks throw its error. Exceptions of O::step() pass through;
// the ranks may have different parameters afterwards.
//
// O: torch::optim::AdamW, Adam, SGD, RMSprop, Adagrad, those of cadre/tensor/optim, or another
// elementwise optimizer that is constructed from parameter groups and options. O updates slices of
// flat buffers. With the optimizers of cadre/tensor/optim the results have the same bits as without
// ZeRO; with others they may differ in the last bits.
//
// The class is a torch::optim::Optimizer, so schedulers and zero_grad() work with it.
// param_groups() returns the groups that were passed; their options may be changed between steps.
// Options may depend on a parameter's number of dims, because groups contain tensors of the
// original shapes. In stage 1 (whole gradients on all ranks) the params() of the groups are the
// parameters. In stage 2 (DistributedDataParallel with GradientPlacement::kSharded) they are this
// rank's shards, whose grad() is the shard of the gradients. state() is empty: see
// local_optimizer() and state_dict(). torch::save() writes only this rank's part of the state and
// the options of param_groups(); torch::load() restores both, but only on the same rank of a group
// of the same size. If the archive is wrong on any rank, load() throws on all ranks and changes no
// state. Source: torch.distributed.optim.ZeroRedundancyOptimizer; ZeRO, arXiv:1910.02054.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <concepts>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/zero/options.h"
#include "cadre/parallel/zero/zero_core.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/tensor/optim/parameter_state.h"
#include "cadre/tensor/optim/saved_part.h"
#include "cadre/tensor/optim/state_loading.h"
#include "cadre/tensor/optim/state_tensors.h"

namespace cadre {

template <typename T>
concept OptimizerOptionsType = std::derived_from<T, torch::optim::OptimizerOptions>;

// A wrapper such as DistributedDataParallel: every rank has all parameters, and whole gradients or
// shards of them.
template <typename Model>
concept HasReplicas = requires(Model& model) {
  { model.module()->named_parameters() };
  { model.process_group() } -> std::convertible_to<ProcessGroup>;
};

template <typename Model>
inline constexpr bool kHasDividedOptimizer = false;

template <typename O>
class ZeroRedundancyOptimizer final : public torch::optim::Optimizer {
 public:
  // The type of module.named_parameters().
  using Named = torch::OrderedDict<std::string, at::Tensor>;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // Constructs an optimizer for stage 1: when step() is called, the gradients must be whole and
  // equal on all ranks, as after a backward of DistributedDataParallel. Broadcasts rank 0's values.
  template <OptimizerOptionsType Options>
  // ranks: a ProcessGroup, or a mesh of one axis.
  ZeroRedundancyOptimizer(const Named& parameters, const Ranks& ranks, const Options& defaults,
                          const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(parameters, ranks, one_group(parameters.values()), defaults,
                                options) {}
  // groups: parameter groups with tensors of `parameters`. Parameters that are in no group are not
  // updated.
  template <OptimizerOptionsType Options>
  ZeroRedundancyOptimizer(const Named& parameters, const Ranks& ranks, const Groups& groups,
                          const Options& defaults, const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(
            make_core(parameters, ranks.group_of_one_axis("ZeroRedundancyOptimizer", "dp"), options,
                      {groups, &defaults}),
            groups, defaults, options) {}

  // Takes a wrapper, whose options determine the stage. Without `groups`, one group contains all
  // parameters, each once even if it is registered under two names.
  template <typename Model, OptimizerOptionsType Options>
    requires HasReplicas<Model>
  ZeroRedundancyOptimizer(Model& model, const Options& defaults, const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(model, one_group(tensors_of(distinct_parameters(*model.module()))),
                                defaults, options) {}
  template <typename Model, OptimizerOptionsType Options>
    requires HasReplicas<Model>
  ZeroRedundancyOptimizer(Model& model, const Groups& groups, const Options& defaults,
                          const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(make_core_of(model, options, {groups, &defaults}), groups, defaults,
                                options) {}

  // Does not compile, with a message that says why, for a wrapper such as FullyShardedDataParallel,
  // whose optimizer is divided already.
  template <typename Model, OptimizerOptionsType Options>
    requires(HasParameterShards<Model> && !HasReplicas<Model>)
  ZeroRedundancyOptimizer(Model&, const Options&, const ZeroOptions& = {})
      : torch::optim::Optimizer(std::vector<at::Tensor>(),
                                std::unique_ptr<torch::optim::OptimizerOptions>()) {
    static_assert(kHasDividedOptimizer<Model>,
                  "cadre::ZeroRedundancyOptimizer: each rank owns shards of this wrapper's "
                  "parameters, so the optimizer state is divided already. Make a plain optimizer "
                  "from model.parameters(), for example cadre::AdamW");
  }

  ZeroStage stage() const { return core().stage(); }

  // Updates this rank's shard and gathers the parameters. closure: computes this rank's loss, which
  // step() returns.
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::NoGradGuard no_grad;
    at::Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    core().begin_step(param_groups(), [this](const at::Tensor& leaf) { return mark_of(leaf); });
    {
      const StepEnd end{*core_};
      follow_groups();
      for (size_t k = 0; k < core_->buckets().size(); ++k) {
        core_->lend_gradients(k);
        local_->step();
        core_->gather(k);
      }
    }
    if (waits_in_step_) core_->finish_gathers();
    return loss;
  }

  // Waits for the gathers of the last step.
  void wait() { core().finish_gathers(); }

  // Adds a parameter group, of the same kind as those of the constructor.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    core().add_group(group, this->defaults());
    follow_groups();
    const torch::optim::OptimizerParamGroup outer = outer_group(*core_, group);
    // This may throw, so it comes before the change of param_groups().
    local_->add_param_group(local_group(outer));
    Optimizer::add_param_group(outer);
    take_options_of_local();
  }

  // Returns the optimizer that updates this rank's shard: its groups and states contain the
  // `values` of parameter_shards(). Each step copies the options of param_groups() to it.
  O& local_optimizer() {
    copy_options();
    return *local_;
  }
  const O& local_optimizer() const {
    copy_options();
    return *local_;
  }
  // Returns the shards that this rank updates: in stage 1 in the order of the flat buffers, in
  // stage 2 in the order of the model's parameter_shards().
  std::vector<ParameterShard> parameter_shards() const { return core().parameter_shards(); }

  // Gathers and returns the whole optimizer state of every parameter that has one, without learning
  // rates and other options. If only_on is given, only that rank gets the result, and the others an
  // empty list. Collective.
  std::vector<ParameterState> state_dict(std::optional<int> only_on = {}) const {
    const int num_ranks = core().group().world_size();
    if (only_on && (*only_on < 0 || *only_on >= num_ranks)) {
      core_->refuse("state_dict(only_on) is called with rank " + std::to_string(*only_on) +
                    ", expected a rank from 0 to " + std::to_string(num_ranks - 1));
    }
    std::vector<ParameterState> states;
    const bool is_kept = !only_on || core_->group().rank() == *only_on;
    check_states_alike();
    for (size_t k = 0; k < core_->buckets().size(); ++k) {
      for (ParameterState& state : gathered_states(k)) {
        if (is_kept) states.push_back(std::move(state));
      }
    }
    return states;
  }
  // Replaces the optimizer state by `states`, which must be the same list on all ranks. It may have
  // been saved by another number of ranks. A parameter that is not in the list has no state
  // afterwards, as in a new optimizer. If a check fails on any rank, throws on all ranks and
  // changes no state.
  void load_state_dict(std::span<const ParameterState> states) {
    std::vector<std::pair<at::Tensor, std::unique_ptr<State>>> loaded;
    core().check_on_all([&] {
      for (const ParameterState& state : states) {
        auto part = own_part(state);
        const auto is_same = [&part](const auto& other) { return other.first.is_same(part.first); };
        if (std::ranges::any_of(loaded, is_same)) {
          core_->refuse("the state of \"" + state.parameter + "\" is given twice");
        }
        loaded.push_back(std::move(part));
      }
    });
    optim_state::SetAside earlier(*local_);
    for (auto& [leaf, state] : loaded) {
      local_->state()[leaf.unsafeGetTensorImpl()] = std::move(state);
    }
    check_states_alike();
    earlier.keep_loaded();
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    copy_options();
    local_->save(archive);
    if constexpr (!optim_state::SavesPart<O>) {
      optim_state::write_part(archive, local_->param_groups());
    }
  }
  void load(torch::serialize::InputArchive& archive) override {
    copy_options();
    optim_state::SetAside earlier(*local_);
    core().check_on_all([&] {
      optim_state::check_part(archive, local_->param_groups(),
                              "ZeroRedundancyOptimizer of " + name());
      local_->load(archive);
    });
    earlier.keep_loaded();
    for (size_t i = 0; i < param_groups().size() && i < local_->param_groups().size(); ++i) {
      param_groups()[i].set_options(local_->param_groups()[i].options().clone());
    }
  }

 private:
  using State = optim_state::StateOf<O>;
  using Settings = parallel::ZeroCore::Settings;
  struct StepEnd {
    parallel::ZeroCore& core;
    ~StepEnd() { core.end_step(); }
  };

  template <typename Options>
  ZeroRedundancyOptimizer(std::shared_ptr<parallel::ZeroCore> core, const Groups& groups,
                          const Options& defaults, const ZeroOptions& options)
      : Optimizer(outer_groups(*core, groups), std::make_unique<Options>(defaults)),
        core_(std::move(core)),
        waits_in_step_(options.wait_in_step.value_or(stage() == ZeroStage::kReplicatedGradients)),
        local_(std::make_unique<O>(local_groups(outer_groups(*core_, groups)), defaults)) {
    take_options_of_local();
  }

  static std::string name() { return c10::demangle_type<O>(); }

  static std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& each : named) tensors.push_back(each.tensor);
    return tensors;
  }

  static Groups one_group(std::vector<at::Tensor> parameters) {
    Groups groups;
    groups.emplace_back(std::move(parameters));
    return groups;
  }

  static std::shared_ptr<parallel::ZeroCore> make_core(const Named& parameters,
                                                       const ProcessGroup& group,
                                                       const ZeroOptions& options,
                                                       const Settings& settings) {
    std::unordered_set<const void*> seen;
    std::vector<NamedTensor> distinct;
    for (const auto& item : parameters) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
        distinct.push_back({item.key(), item.value()});
      }
    }
    return std::make_shared<parallel::ZeroCore>(name(), std::move(distinct), group, options,
                                                settings);
  }

  template <typename Model>
  static std::shared_ptr<parallel::ZeroCore> make_core_of(Model& model, const ZeroOptions& options,
                                                          const Settings& settings) {
    if constexpr (shard::HasFlatParameters<Model>) {
      const std::vector<std::shared_ptr<shard::FlatParameters>> flat =
          shard::WrapperAccess::flat_parameters(model);
      if (!flat.empty()) {
        return std::make_shared<parallel::ZeroCore>(name(), flat, model.parameter_shards(),
                                                    settings);
      }
    }
    auto core =
        make_core(model.module()->named_parameters(), model.process_group(), options, settings);
    if constexpr (requires { model.call_before_forward([] {}); }) {
      model.call_before_forward([waiting = std::weak_ptr<parallel::ZeroCore>(core)] {
        if (const auto alive = waiting.lock()) alive->finish_gathers();
      });
    }
    if constexpr (requires { model.call_before_backward([] {}); }) {
      model.call_before_backward([written = std::weak_ptr<parallel::ZeroCore>(core)] {
        if (const auto alive = written.lock()) alive->show_writes();
      });
    }
    return core;
  }

  static torch::optim::OptimizerParamGroup outer_group(
      const parallel::ZeroCore& core, const torch::optim::OptimizerParamGroup& group) {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& parameter : group.params()) {
      parameters.push_back(core.outer_of(parameter));
    }
    if (!group.has_options()) return {std::move(parameters)};
    return {std::move(parameters), group.options().clone()};
  }

  static Groups outer_groups(const parallel::ZeroCore& core, const Groups& groups) {
    Groups outer;
    for (const auto& group : groups) outer.push_back(outer_group(core, group));
    return outer;
  }

  torch::optim::OptimizerParamGroup local_group(
      const torch::optim::OptimizerParamGroup& group) const {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& parameter : group.params()) leaves.push_back(core_->leaf_of(parameter));
    if (!group.has_options()) return {std::move(leaves)};
    return {std::move(leaves), group.options().clone()};
  }

  Groups local_groups(const Groups& outer) const {
    Groups groups;
    for (const auto& group : outer) groups.push_back(local_group(group));
    return groups;
  }

  parallel::ZeroCore& core() const {
    if (core_) return *core_;
    throw Error(ErrorCode::kInvalidArgument,
                "ZeroRedundancyOptimizer of " + name() +
                    ": this optimizer was moved from; use the optimizer that it was moved to");
  }

  // Copies the options of new groups from the local optimizer to param_groups(), because only O
  // knows how it merges a group's options with its defaults.
  void take_options_of_local() {
    for (size_t i = 0; i < param_groups().size(); ++i) {
      param_groups()[i].set_options(local_->param_groups()[i].options().clone());
    }
  }

  // Copies the options of param_groups() to the local optimizer, because a scheduler or the program
  // may have changed them since the last step.
  void copy_options() const {
    static_cast<void>(core());
    Groups& locals = local_->param_groups();
    for (size_t i = 0; i < param_groups().size() && i < locals.size(); ++i) {
      locals[i].set_options(param_groups()[i].options().clone());
    }
  }

  // Returns whether `local`, a group of the local optimizer, has exactly the leaves of the
  // parameters in `group`.
  bool is_followed(const torch::optim::OptimizerParamGroup& group,
                   const torch::optim::OptimizerParamGroup& local) const {
    return std::ranges::equal(group.params(), local.params(),
                              [this](const at::Tensor& parameter, const at::Tensor& leaf) {
                                return core_->leaf_of(parameter).is_same(leaf) &&
                                       core_->outer_of(parameter).is_same(parameter);
                              });
  }

  // Repeats in the local optimizer what the program has changed in param_groups(): options, added
  // and removed groups, and the parameters of a group.
  void follow_groups() {
    Groups& locals = local_->param_groups();
    for (size_t i = 0; i < param_groups().size(); ++i) {
      torch::optim::OptimizerParamGroup& group = param_groups()[i];
      if (i < locals.size() && is_followed(group, locals[i])) {
        locals[i].set_options(group.options().clone());
        continue;
      }
      group = outer_group(*core_, group);
      if (i == locals.size()) {
        // add_param_group() ignores options that equal the defaults of their class, so they are set
        // again below.
        local_->add_param_group(local_group(group));
        locals[i].set_options(group.options().clone());
      } else {
        locals[i] = local_group(group);
      }
    }
    while (locals.size() > param_groups().size()) locals.pop_back();
  }

  // Returns the options of the leaf's group; null if the leaf is in no group.
  const torch::optim::OptimizerOptions* options_of(const at::Tensor& leaf) const {
    for (const auto& group : local_->param_groups()) {
      const auto is_leaf = [&leaf](const at::Tensor& other) { return other.is_same(leaf); };
      if (std::ranges::any_of(group.params(), is_leaf)) return &group.options();
    }
    return nullptr;
  }

  const State* state_of(const at::Tensor& leaf) const {
    const auto found = local_->state().find(leaf.unsafeGetTensorImpl());
    return found == local_->state().end() ? nullptr
                                          : static_cast<const State*>(found->second.get());
  }

  int64_t mark_of(const at::Tensor& leaf) const {
    return optim_state::mark_of_state(*local_, leaf);
  }

  void check_states_alike() const {
    std::vector<int64_t> marks;
    for (const auto& flat : core().buckets()) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        marks.push_back(mark_of(flat->values(i)));
      }
    }
    core_->check_alike(marks, "the state");
  }

  std::vector<ParameterState> gathered_states(size_t bucket) const {
    const shard::FlatParameters& flat = *core_->buckets()[bucket];
    const size_t count = flat.parameters().size();
    std::map<std::string, std::vector<at::Tensor>> parts;
    std::vector<ParameterState> all(count);
    for (size_t i = 0; i < count; ++i) {
      const State* const state = state_of(flat.values(i));
      if (state == nullptr) continue;
      all[i].parameter = flat.parameters()[i].name;
      if constexpr (requires { state->step(); }) {
        all[i].scalars.push_back({"step", at::scalar_tensor(state->step(), at::kLong)});
      }
      optim_state::visit_state_tensors(*state, [&](const char* field, const at::Tensor& tensor) {
        parts[field].resize(count);
        parts[field][i] = tensor;
      });
    }
    for (const auto& [field, tensors] : parts) {
      const std::vector<at::Tensor> whole = core_->gather_states(bucket, tensors);
      for (size_t i = 0; i < count; ++i) {
        if (whole[i].defined()) all[i].tensors.push_back({field, whole[i]});
      }
    }
    std::erase_if(all, [](const ParameterState& state) { return state.parameter.empty(); });
    return all;
  }

  std::pair<at::Tensor, std::unique_ptr<State>> own_part(const ParameterState& given) const {
    const auto [flat, index] = core_->find(given.parameter);
    auto state = std::make_unique<State>();
    const FlatRange range = flat->layout().range(index, core_->group().rank());
    const at::Tensor& leaf = flat->values(index);
    std::vector<std::string> fields;
    optim_state::visit_state_tensors(
        *state, [&fields](const char* field, const at::Tensor&) { fields.emplace_back(field); });
    core_->check_state(given, {.sizes = flat->parameters()[index].tensor.sizes(),
                               .fields = std::move(fields),
                               .options = options_of(leaf)});
    optim_state::visit_state_tensors(*state, [&](const char* field, at::Tensor& tensor) {
      const auto found = std::ranges::find(given.tensors, field, &NamedTensor::name);
      if (found == given.tensors.end()) return;
      const at::Tensor& whole = found->tensor;
      tensor = whole.reshape({-1})
                   .narrow(0, range.begin, range.size())
                   .to(leaf.device(), leaf.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    });
    if constexpr (requires { state->step(); }) {
      const auto step = std::ranges::find(given.scalars, "step", &NamedTensor::name);
      if (step == given.scalars.end()) {
        core_->refuse("the state of \"" + given.parameter + "\" has no step");
      }
      state->step(step->tensor.template item<int64_t>());
      if (state->step() < 0) {
        core_->refuse("the state of \"" + given.parameter + "\" counts " +
                      std::to_string(state->step()) + " steps; expected 0 or more");
      }
    }
    return {leaf, std::move(state)};
  }

  std::shared_ptr<parallel::ZeroCore>
      core_;  // the wrapper refers to it, and its forward waits for the gathers
  bool waits_in_step_;
  std::unique_ptr<O> local_;
};

template <typename O>
inline constexpr bool kIsDivisible = false;

template <std::derived_from<torch::optim::LBFGS> O>
class ZeroRedundancyOptimizer<O> {
  static_assert(kIsDivisible<O>,
                "cadre::ZeroRedundancyOptimizer: LBFGS computes its step from all parameters at "
                "once, so ranks cannot divide it. Use an optimizer that works element by element, "
                "for example cadre::AdamW");

 public:
  template <typename... Args>
  explicit ZeroRedundancyOptimizer(Args&&...) {}
};

}  // namespace cadre
