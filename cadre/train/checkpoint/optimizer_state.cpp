#include "cadre/train/checkpoint/optimizer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/optim/optimizers.h"

namespace cadre {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// References to the tensors and scalars in the state object that an optimizer has for one
// parameter. Tensors that the optimizer's options do not use are not listed.
struct Fields {
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  int64_t* step = nullptr;
};

Fields fields(torch::optim::AdamParamState& state, const torch::optim::AdamOptions& options) {
  Fields found{{{"exp_avg", &state.exp_avg()}, {"exp_avg_sq", &state.exp_avg_sq()}}, &state.step()};
  if (options.amsgrad()) found.tensors.emplace_back("max_exp_avg_sq", &state.max_exp_avg_sq());
  return found;
}

Fields fields(torch::optim::AdamWParamState& state, const torch::optim::AdamWOptions& options) {
  Fields found{{{"exp_avg", &state.exp_avg()}, {"exp_avg_sq", &state.exp_avg_sq()}}, &state.step()};
  if (options.amsgrad()) found.tensors.emplace_back("max_exp_avg_sq", &state.max_exp_avg_sq());
  return found;
}

Fields fields(torch::optim::SGDParamState& state, const torch::optim::SGDOptions& options) {
  Fields found;
  if (options.momentum() != 0) {
    found.tensors.emplace_back("momentum_buffer", &state.momentum_buffer());
  }
  return found;
}

Fields fields(torch::optim::RMSpropParamState& state, const torch::optim::RMSpropOptions& options) {
  Fields found{{{"square_avg", &state.square_avg()}}, &state.step()};
  if (options.momentum() > 0) {
    found.tensors.emplace_back("momentum_buffer", &state.momentum_buffer());
  }
  if (options.centered()) found.tensors.emplace_back("grad_avg", &state.grad_avg());
  return found;
}

Fields fields(torch::optim::AdagradParamState& state, const torch::optim::AdagradOptions&) {
  return {{{"sum", &state.sum()}}, &state.step()};
}

Fields fields(AdadeltaParamState& state, const AdadeltaOptions&) {
  return {{{"square_avg", &state.square_avg()}, {"acc_delta", &state.acc_delta()}}, &state.step()};
}

// The functions for one kind of optimizer: one makes a new state object, one lists its fields.
struct Rule {
  std::string name;
  std::unique_ptr<OptimizerParamState> (*make)();
  Fields (*fields_of)(OptimizerParamState& state, const OptimizerOptions& options);
};

template <typename State, typename Options>
Rule rule(std::string name) {
  return {std::move(name),
          []() -> std::unique_ptr<OptimizerParamState> { return std::make_unique<State>(); },
          [](OptimizerParamState& state, const OptimizerOptions& options) {
            return fields(static_cast<State&>(state), static_cast<const Options&>(options));
          }};
}

Rule rule_of(const torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim;
  const auto is = [&optimizer]<typename Kind>(std::type_identity<Kind>) {
    return dynamic_cast<const Kind*>(&optimizer) != nullptr;
  };
  if (is(std::type_identity<optim::AdamW>())) {
    return rule<optim::AdamWParamState, optim::AdamWOptions>("AdamW");
  }
  if (is(std::type_identity<optim::Adam>())) {
    return rule<optim::AdamParamState, optim::AdamOptions>("Adam");
  }
  if (is(std::type_identity<optim::SGD>())) {
    return rule<optim::SGDParamState, optim::SGDOptions>("SGD");
  }
  if (is(std::type_identity<optim::RMSprop>())) {
    return rule<optim::RMSpropParamState, optim::RMSpropOptions>("RMSprop");
  }
  if (is(std::type_identity<optim::Adagrad>())) {
    return rule<optim::AdagradParamState, optim::AdagradOptions>("Adagrad");
  }
  if (is(std::type_identity<Adadelta>())) {
    return rule<AdadeltaParamState, AdadeltaOptions>("Adadelta");
  }
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("a snapshot cannot hold the state of {}; expected Adam, AdamW, SGD, "
                            "RMSprop, Adagrad or Adadelta. For a cadre::ZeroRedundancyOptimizer "
                            "pass local_optimizer(), with the parts of its parameter_shards()",
                            c10::demangle(typeid(optimizer).name())));
}

// A parameter of the optimizer: its SnapshotTensor, its index among the SnapshotTensors of the same
// name, and the options of its parameter group.
struct Place {
  const SnapshotTensor* parameter;
  size_t entry;
  const OptimizerOptions* options;
};

// Returns one Place for each parameter of the optimizer, in the optimizer's order.
std::vector<Place> places_of(const torch::optim::Optimizer& optimizer,
                             std::span<const SnapshotTensor> parameters) {
  const SnapshotEntries entries = entries_of(parameters);
  std::unordered_map<const void*, SnapshotEntries::const_iterator> by_leaf;
  for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
    by_leaf.emplace(entry->second->values.unsafeGetTensorImpl(), entry);
  }
  std::vector<Place> places;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& leaf : group.params()) {
      const auto found = by_leaf.find(leaf.unsafeGetTensorImpl());
      if (found == by_leaf.end()) {
        throw Error(
            ErrorCode::kInvalidArgument,
            cadre::format("parameter {} of the optimizer, with sizes {}, is none of the {} "
                          "parameters of the snapshot; construct the optimizer from the leaves "
                          "that the wrapped model gives",
                          places.size(), list_of(leaf.sizes()), parameters.size()));
      }
      const auto& [key, parameter] = *found->second;
      places.push_back({parameter, key.second, &group.options()});
    }
  }
  return places;
}

[[noreturn]] void refuse(const Rule& rule, const std::string& parameter, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("state of '{}' for {}: {}", parameter, rule.name, what));
}

[[noreturn]] void refuse_other_kind(const Rule& rule, const ParameterState& given,
                                    const std::string& missing) {
  std::string names;
  for (const auto* list : {&given.tensors, &given.scalars}) {
    for (const auto& [name, tensor] : *list) {
      if (tensor.defined()) names += cadre::format("{}'{}'", names.empty() ? "" : ", ", name);
    }
  }
  refuse(rule, given.parameter,
         cadre::format("'{}' is missing; the state has {}, so another kind of optimizer has saved "
                       "it, or one with other options. Load it into that optimizer, with the same "
                       "options; or leave out load_state_dict(), and the optimizer begins anew",
                       missing, names.empty() ? "nothing" : names));
}

const at::Tensor* find(const std::vector<NamedTensor>& tensors, const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &NamedTensor::name);
  return found == tensors.end() ? nullptr : &found->tensor;
}

// Returns a dense copy in new memory. Inference mode is switched off, because a tensor that is made
// in that mode cannot be changed in place outside of it.
at::Tensor copy_of(const at::Tensor& tensor) {
  const c10::InferenceMode mode(false);
  const at::NoGradGuard no_grad;
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor.detach());
}

// Returns a copy of `tensor` with the sizes and the dtype of `values`. If the memory of `values` is
// a mapped file, the copy is put into that file, too.
at::Tensor copy_beside(const at::Tensor& values, const at::Tensor& tensor) {
  const c10::InferenceMode mode(false);
  const at::NoGradGuard no_grad;
  at::Tensor copy = FileMemory::of(values) ? zeros_beside(values) : at::empty_like(values);
  return copy.copy_(tensor.detach().reshape(values.sizes()));
}

std::unique_ptr<OptimizerParamState> state_from(const Rule& rule, const Place& place,
                                                const ParameterState& given) {
  std::unique_ptr<OptimizerParamState> state = rule.make();
  const Fields wanted = rule.fields_of(*state, *place.options);
  const at::Tensor& values = place.parameter->values;
  for (const auto& [name, field] : wanted.tensors) {
    const at::Tensor* tensor = find(given.tensors, name);
    if (tensor == nullptr || !tensor->defined()) {
      refuse_other_kind(rule, given, name);
    }
    if (tensor->numel() != values.numel()) {
      refuse(rule, given.parameter,
             cadre::format("'{}' has {} elements; expected {}", name, tensor->numel(),
                           values.numel()));
    }
    if (tensor->scalar_type() != values.scalar_type()) {
      refuse(
          rule, given.parameter,
          cadre::format("'{}' has dtype {}; expected {}, the dtype of the parameter", name,
                        c10::toString(tensor->scalar_type()), c10::toString(values.scalar_type())));
    }
    *field = copy_beside(values, *tensor);
  }
  if (wanted.step != nullptr) {
    const at::Tensor* step = find(given.scalars, "step");
    if (step == nullptr || !step->defined() || step->numel() != 1) {
      refuse_other_kind(rule, given, "step");
    }
    *wanted.step = step->item().to<int64_t>();
    if (*wanted.step < 0) {
      refuse(rule, given.parameter,
             cadre::format("'step' is {}; expected 0 or more", *wanted.step));
    }
  }
  const size_t num_scalars = wanted.step != nullptr ? 1 : 0;
  for (const auto& [name, tensor] : given.tensors) {
    const bool is_wanted = std::ranges::any_of(
        wanted.tensors, [&name](const auto& field) { return field.first == name; });
    if (!is_wanted) {
      refuse(rule, given.parameter,
             cadre::format("the optimizer has no state '{}' with these options; use the kind of "
                           "optimizer that was saved",
                           name));
    }
  }
  if (given.tensors.size() != wanted.tensors.size()) {
    refuse(rule, given.parameter,
           cadre::format("it has {} tensors; expected {}, each once", given.tensors.size(),
                         wanted.tensors.size()));
  }
  if (given.scalars.size() != num_scalars) {
    refuse(rule, given.parameter,
           cadre::format("it has {} scalars; expected {}", given.scalars.size(), num_scalars));
  }
  return state;
}

// Returns whether a step of the optimizer needs a state of the parameter.
bool needs_state(const Rule& rule, const Place& place) {
  const std::unique_ptr<OptimizerParamState> state = rule.make();
  const Fields wanted = rule.fields_of(*state, *place.options);
  return place.parameter->values.requires_grad() && !wanted.tensors.empty();
}

[[noreturn]] void refuse_no_state(const Rule& rule) {
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format(
                  "load_state_dict() for {}: there is no state of any parameter, so the optimizer "
                  "would begin anew. Set parts.optimizer = state_dict(optimizer, "
                  "parts.parameters) before the save, and load with the option with_optimizer. "
                  "If the optimizer is to begin anew, for example because the snapshot is older "
                  "than its first step, leave out this call, or pass {{.allow_none = true}}",
                  rule.name));
}

// Returns whether only other ranks have elements of the parameter, for example because it belongs
// to another stage of a pipeline. This rank's optimizer need not contain such a parameter.
bool is_held_elsewhere(const SnapshotEntries& entries, const ParameterState& state) {
  const auto found = entries.find({state.parameter, state.entry});
  return found != entries.end() && found->second->boxes.empty();
}

}  // namespace

std::vector<ParameterState> state_dict(const torch::optim::Optimizer& optimizer,
                                       std::span<const SnapshotTensor> parameters,
                                       const StateDictOptions& options) {
  const Rule rule = rule_of(optimizer);
  std::vector<ParameterState> states;
  for (const Place& place : places_of(optimizer, parameters)) {
    const at::Tensor& leaf = place.parameter->values;
    const auto found = optimizer.state().find(leaf.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const Fields held = rule.fields_of(*found->second, *place.options);
    ParameterState state{.parameter = place.parameter->name, .entry = place.entry};
    for (const auto& [name, tensor] : held.tensors) {
      if (!tensor->defined()) continue;
      state.tensors.push_back({name, options.is_shared ? *tensor : copy_of(*tensor)});
    }
    if (held.step != nullptr) {
      state.scalars.push_back({"step", at::scalar_tensor(*held.step, at::kLong)});
    }
    if (!state.tensors.empty() || !state.scalars.empty()) states.push_back(std::move(state));
  }
  return states;
}

void load_state_dict(torch::optim::Optimizer& optimizer, std::span<const SnapshotTensor> parameters,
                     std::span<const ParameterState> states, const LoadStateDictOptions& options) {
  const Rule rule = rule_of(optimizer);
  const SnapshotEntries entries = entries_of(parameters);
  std::map<std::pair<std::string, size_t>, Place> places;
  for (const Place& place : places_of(optimizer, parameters)) {
    places.emplace(std::pair(place.parameter->name, place.entry), place);
    if (states.empty() && !options.allow_none && needs_state(rule, place)) refuse_no_state(rule);
  }
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> made;
  for (const ParameterState& state : states) {
    const auto place = places.find({state.parameter, state.entry});
    if (place == places.end() && is_held_elsewhere(entries, state)) continue;
    if (place == places.end()) refuse(rule, state.parameter, "the optimizer has no such parameter");
    void* const key = place->second.parameter->values.unsafeGetTensorImpl();
    if (std::ranges::any_of(made, [key](const auto& known) { return known.first == key; })) {
      refuse(rule, state.parameter, "the state is given twice");
    }
    made.emplace_back(key, state_from(rule, place->second, state));
  }
  optimizer.state().clear();
  for (auto& [key, state] : made) optimizer.state()[key] = std::move(state);
}

}  // namespace cadre
