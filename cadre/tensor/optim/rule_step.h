// The step() and load() of Cadre's own optimizers, as templates over a rule such as AdamRule.
// step() first checks all parameters, then creates missing states and then calls the kernels, so
// that an error leaves everything unchanged. load() loads all of the state or none of it.
//
// Threads: one. Lifetime: keeps nothing. Errors: those of fused_kernels.h and state_loading.h.
// A rule has the types Options and State, kName for messages, kDtypes that its kernel computes,
// states() with the state tensors that options need, run() for a batch of parameters, and
// initial_value() if a state does not begin with 0.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/optim/fused_kernels.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/state_loading.h"

namespace cadre::optim_state {

using torch::optim::OptimizerParamGroup;

struct NamedState {
  std::string_view name;
  at::Tensor* tensor;
};

// Increments the parameter's step number and returns it.
template <typename State>
int64_t count_step(State& state) {
  state.step(state.step() + 1);
  return state.step();
}

// Divides parameters into rounds, one kernel call each, so that no two parameters of a round share
// memory. Parameters that share memory are in successive rounds, in the order in which they were
// added.
class Rounds {
 public:
  // Adds a parameter and returns the index of its round.
  size_t add(const at::Tensor& parameter) {
    const auto* const begin = static_cast<const std::byte*>(parameter.const_data_ptr());
    const auto* const end = begin + parameter.nbytes();
    size_t round = ends_.size();
    while (round > 0 && is_free(ends_[round - 1], begin, end)) --round;
    if (round == ends_.size()) ends_.emplace_back();
    if (begin != end) ends_[round].emplace(begin, end);
    return round;
  }

 private:
  // The address ranges of the parameters of a round: a map from begin to end.
  using Ends = std::map<const std::byte*, const std::byte*, std::less<>>;

  static bool is_free(const Ends& ends, const std::byte* begin, const std::byte* end) {
    const auto next = ends.lower_bound(end);  // the first range that begins at or after `end`
    return begin == end || next == ends.begin() || std::prev(next)->second <= begin;
  }

  std::vector<Ends> ends_;
};

// Returns the options of a group; throws if they are those of another optimizer. index: the group's
// index, for the message.
template <typename Rule>
const typename Rule::Options& checked_options(const OptimizerParamGroup& group, size_t index) {
  const auto* options = dynamic_cast<const typename Rule::Options*>(&group.options());
  if (options != nullptr) return *options;
  throw Error(
      ErrorCode::kInvalidArgument,
      cadre::format("{}: parameter group {} has the options of another optimizer, which the "
                    "fused kernel does not know. Give the group options of {}",
                    Rule::kName, index, Rule::kName));
}

// Throws if the group has the options of another optimizer. Accepts a group without options, which
// gets the defaults later.
template <typename Rule>
void check_given_options(const OptimizerParamGroup& group, size_t index) {
  if (group.has_options()) checked_options<Rule>(group, index);
}

// Runs check_given_options() on each group and returns the groups, for use in a constructor's
// initializer list.
template <typename Rule>
const std::vector<OptimizerParamGroup>& checked_groups(
    const std::vector<OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) check_given_options<Rule>(groups[i], i);
  return groups;
}

// Runs one step of the optimizer: first all checks, then the kernels, so that an error changes
// nothing.
template <typename Rule>
class RuleStep {
 public:
  using Options = typename Rule::Options;
  using State = typename Rule::State;

  RuleStep(torch::optim::Optimizer& optimizer, const ParameterNames& names)
      : optimizer_(optimizer), names_(names) {}

  void run() {
    size_t index = 0;  // index of the parameter, counted through all groups
    for (size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
      const OptimizerParamGroup& group = optimizer_.param_groups()[i];
      const Options& options = checked_options<Rule>(group, i);
      for (const at::Tensor& parameter : group.params()) check(parameter, options, index++);
    }
    make_states();
    for (const OptimizerParamGroup& group : optimizer_.param_groups()) update(group);
  }

 private:
  // The parameters of one kernel call. A kernel of a device takes tensors of one device and one
  // dtype; the CPU's kernels take all dtypes.
  struct BatchKey {
    size_t round;
    bool is_first_step;
    c10::DeviceType type;
    c10::DeviceIndex index;
    at::ScalarType dtype;

    auto operator<=>(const BatchKey&) const = default;
  };
  static BatchKey key_of(const at::Tensor& parameter, size_t round, bool is_first) {
    const c10::Device device = parameter.device();
    return {.round = round,
            .is_first_step = is_first,
            .type = device.type(),
            .index = device.index(),
            .dtype = device.is_cpu() ? at::ScalarType::Undefined : parameter.scalar_type()};
  }

  void check(const at::Tensor& parameter, const Options& options, size_t index) {
    if (!parameter.grad().defined()) return;
    const auto name = names_.find(parameter.unsafeGetTensorImpl());
    const ParameterPlace place = {Rule::kName, index,
                                  name == names_.end() ? std::string_view() : name->second};
    check_parameter(parameter, place, Rule::kDtypes);
    check_gradient(parameter, parameter.grad(), place);
    State* const state = find_state(parameter);
    if (state == nullptr) {
      check_state_to_be_made(parameter, options, place);
      return;
    }
    for (const NamedState& named : Rule::states(*state, options)) {
      check_state(parameter, *named.tensor, named.name, place);
    }
  }

  // Checks a parameter without state, which may be in several groups. The first group whose options
  // need a state creates it, so that state must suffice for the other groups, too.
  void check_state_to_be_made(const at::Tensor& parameter, const Options& options,
                              const ParameterPlace& place) {
    void* const key = parameter.unsafeGetTensorImpl();
    if (optimizer_.state().find(key) != optimizer_.state().end()) {
      refuse_empty_state({place.optimizer, place.index, place.name});
    }
    State made;
    const std::vector<NamedState> needed = Rule::states(made, options);
    if (needed.empty()) return;
    const Options& maker = *makers_.emplace(key, &options).first->second;
    const size_t num_made = Rule::states(made, maker).size();
    if (needed.size() <= num_made) return;
    refuse_parameter(
        place,
        cadre::format(
            "{} is also in an earlier parameter group, whose options make a state without {}. The "
            "options of this group need that tensor. Give the groups the same options",
            to_text(place), needed[num_made].name));
  }

  State* find_state(const at::Tensor& parameter) {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    // The cast is valid, because load() of the base class creates states of this type only.
    return found == optimizer_.state().end() ? nullptr : static_cast<State*>(found->second.get());
  }

  void update(const OptimizerParamGroup& group) {
    const Options& options = static_cast<const Options&>(group.options());
    // One batch for each kernel call. Several rounds are needed because a parameter that is listed
    // several times is updated as many times in sequence, as in torch::optim, and parameters that
    // share memory are updated one after the other.
    std::map<BatchKey, FusedBatch> batches;
    Rounds rounds;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const size_t round = rounds.add(parameter);
      State* const state = find_state(parameter);
      const auto made = made_.find(parameter.unsafeGetTensorImpl());
      const bool is_first = state == nullptr || (made != made_.end() && made->second == &options);
      if (is_first && state != nullptr) made_.erase(made);
      add(parameter, state, options, batches[key_of(parameter, round, is_first)]);
    }
    for (const auto& [key, batch] : batches) Rule::run(batch, options, key.is_first_step);
  }

  // Creates the missing states of all groups before the first kernel runs. If memory runs out, the
  // new states are removed, and no parameter has changed.
  void make_states() {
    try {
      for (const OptimizerParamGroup& group : optimizer_.param_groups()) {
        const Options& options = static_cast<const Options&>(group.options());
        for (const at::Tensor& parameter : group.params()) {
          if (parameter.grad().defined() && find_state(parameter) == nullptr) {
            make_state(parameter, options);
          }
        }
      }
    } catch (...) {
      for (const auto& [key, options] : made_) optimizer_.state().erase(key);
      throw;
    }
  }

  // Creates the state of a parameter, in the parameter's file if it is offloaded. If the options
  // need no state tensors (SGD without momentum), no state is created, as in torch::optim.
  void make_state(const at::Tensor& parameter, const Options& options) {
    auto state = std::make_unique<State>();
    const auto named_states = Rule::states(*state, options);
    if (named_states.empty()) return;
    for (const NamedState& named : named_states) {
      *named.tensor = zeros_beside(parameter);
      if constexpr (requires { Rule::initial_value(options); }) {
        if (Rule::initial_value(options) != 0) named.tensor->fill_(Rule::initial_value(options));
      }
    }
    void* const key = parameter.unsafeGetTensorImpl();
    made_.emplace(key, &options);
    optimizer_.state()[key] = std::move(state);
  }

  void add(const at::Tensor& parameter, State* state, const Options& options, FusedBatch& batch) {
    batch.parameters.push_back(parameter);
    batch.gradients.push_back(in_order_of(parameter, parameter.grad()));
    if (state == nullptr) return;
    const auto named_states = Rule::states(*state, options);
    batch.states.resize(named_states.size());
    for (size_t k = 0; k < named_states.size(); ++k) {
      at::Tensor& tensor = *named_states[k].tensor;
      // The tensor may have another memory order if torch::optim::SGD made it: its momentum has the
      // strides of the first gradient.
      tensor = in_order_of(parameter, tensor);
      batch.states[k].push_back(tensor);
    }
    if constexpr (requires { state->step(); }) {
      batch.steps.push_back(step_tensor(count_step(*state), parameter.device()));
    }
  }

  // The kernels take the step number as a tensor. Parameters with the same step number share one.
  // The kernels of devices read it as float32, from memory of the device.
  const at::Tensor& step_tensor(int64_t step, const c10::Device& device) {
    at::Tensor& tensor = step_tensors_[{step, device.type(), device.index()}];
    if (!tensor.defined()) {
      tensor = device.is_cpu()
                   ? at::scalar_tensor(step, at::TensorOptions().dtype(at::kDouble))
                   : at::full({}, step, at::TensorOptions().dtype(at::kFloat).device(device));
    }
    return tensor;
  }

  torch::optim::Optimizer& optimizer_;
  const ParameterNames& names_;
  std::map<std::tuple<int64_t, c10::DeviceType, c10::DeviceIndex>, at::Tensor> step_tensors_;
  // The options of the group that will create the state, for each parameter without state.
  std::unordered_map<const void*, const Options*> makers_;
  // The states that this step has created and no kernel has used yet, with the options of the
  // creating group.
  std::unordered_map<void*, const Options*> made_;
};

template <typename Rule>
at::Tensor take_step(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                     const torch::optim::Optimizer::LossClosure& closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure != nullptr) {
    check_closure_mode(Rule::kName);
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  RuleStep<Rule>(optimizer, names).run();
  return loss;
}

// Works around load() of torch::optim, which moves the loaded state once for each occurrence of a
// parameter in the groups, so that the second move leaves an empty state. While this object exists,
// all occurrences of a parameter except the first are replaced by empty tensors.
class ListedOnce {
 public:
  explicit ListedOnce(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::unordered_set<const void*> seen;
    for (OptimizerParamGroup& group : optimizer_.param_groups()) {
      for (at::Tensor& parameter : group.params()) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        replaced_.push_back({&parameter, parameter});
        parameter = at::empty({0});
      }
    }
  }
  ~ListedOnce() {
    for (const Replaced& replaced : replaced_) {
      optimizer_.state().erase(replaced.place->unsafeGetTensorImpl());
      *replaced.place = replaced.parameter;
    }
  }
  ListedOnce(const ListedOnce&) = delete;
  ListedOnce& operator=(const ListedOnce&) = delete;

 private:
  struct Replaced {
    at::Tensor* place;
    at::Tensor parameter;
  };

  torch::optim::Optimizer& optimizer_;
  std::vector<Replaced> replaced_;
};

// Moves loaded states to the device of their parameter, and into its file if it is offloaded.
template <typename Rule>
void move_states(torch::optim::Optimizer& optimizer) {
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto* const options = dynamic_cast<const typename Rule::Options*>(&group.options());
    if (options == nullptr) continue;  // step() will throw for this group
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end() || found->second == nullptr) continue;
      auto& state = static_cast<typename Rule::State&>(*found->second);
      for (const NamedState& named : Rule::states(state, *options)) {
        if (!named.tensor->defined()) continue;
        *named.tensor = moved_beside(parameter, named.tensor->to(parameter.device()));
      }
    }
  }
}

template <typename Rule>
void load_whole(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                const std::function<void()>& load) {
  load_checked<typename Rule::State, typename Rule::Options>(optimizer, Rule::kName, names, [&] {
    const ListedOnce listed_once(optimizer);
    load();
  });
  move_states<Rule>(optimizer);
}

inline ParameterNames names_of(const NamedParameters& named_parameters) {
  ParameterNames names;
  for (const auto& item : named_parameters) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  return names;
}

}  // namespace cadre::optim_state
