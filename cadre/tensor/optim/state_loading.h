// Loads the state of an optimizer from an archive of torch::save: either all of it or nothing.
//
// Threads: one. Blocking: never. Lifetime: keeps nothing. Errors: kInvalidArgument for an archive
// of another optimizer or with other groups. kInvalidArgument that names the parameter if its state
// lacks a tensor that the options need, has one that they do not use, or has one of other sizes or
// another dtype. After an error the optimizer has its previous state and options. In contrast,
// torch::optim accepts such states, merges the loaded state with the previous one, and loses the
// previous state if it throws.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/optim/state_tensors.h"

namespace cadre::optim_state {

// Identifies a parameter in error messages. The name may be empty.
struct Place {
  std::string_view optimizer;
  size_t index = 0;  // index of the parameter, counted through all groups
  std::string_view name;
};

// Throws in inference mode, in which a closure cannot compute gradients. libtorch would report that
// the loss requires no grad.
CADRE_EXPORT void check_closure_mode(std::string_view optimizer);
// Runs `load`. Converts an exception of it to an Error that says that the archive does not fit the
// optimizer.
CADRE_EXPORT void load_archive(std::string_view optimizer, const std::function<void()>& load);
// Throws for an empty state. torch::load leaves one if two parameters were the same parameter when
// the file was saved.
[[noreturn]] CADRE_EXPORT void refuse_empty_state(const Place& place);
// check_needed() throws unless a state tensor that the options need is defined and has the sizes
// and dtype of its parameter; it may be on another device. check_not_needed() throws if a state
// tensor that they do not need is defined.
CADRE_EXPORT void check_needed(const at::Tensor& parameter, const at::Tensor& state,
                               std::string_view state_name, const Place& place);
CADRE_EXPORT void check_not_needed(const at::Tensor& state, std::string_view state_name,
                                   const Place& place);
// Throws for a parameter on a device, whose state no file can have.
CADRE_EXPORT void check_can_be_in_file(const at::Tensor& parameter, const Place& place);
CADRE_EXPORT void check_num_steps(int64_t num_steps, const Place& place);

// Returns whether an optimizer with these options uses the state tensor of this name.
template <typename Options>
bool needs(const Options& options, std::string_view name) {
  if (name == "max_exp_avg_sq") {
    if constexpr (requires { options.amsgrad(); }) return options.amsgrad();
  }
  if (name == "momentum_buffer") {
    if constexpr (requires { options.momentum(); }) return options.momentum() != 0;
  }
  if (name == "grad_avg") {
    if constexpr (requires { options.centered(); }) return options.centered();
  }
  return true;
}

// Moves the state out of an optimizer and copies its options before a load. The destructor restores
// both unless keep_loaded() was called.
class SetAside {
 public:
  explicit SetAside(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), state_(std::move(optimizer.state())) {
    optimizer.state().clear();
    for (const auto& group : optimizer.param_groups()) options_.push_back(group.options().clone());
  }
  ~SetAside() {
    if (is_loaded_) return;
    optimizer_.state() = std::move(state_);
    for (size_t i = 0; i < options_.size(); ++i) {
      optimizer_.param_groups()[i].set_options(std::move(options_[i]));
    }
  }
  SetAside(const SetAside&) = delete;
  SetAside& operator=(const SetAside&) = delete;

  void keep_loaded() { is_loaded_ = true; }

 private:
  using State = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

  torch::optim::Optimizer& optimizer_;
  State state_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
  bool is_loaded_ = false;
};

// Runs `load`, which calls load() of the base class, and checks the loaded state. If one of them
// throws, the previous state is restored. names: names of the parameters for messages; may be
// empty.
template <typename State, typename Options>
void load_checked(torch::optim::Optimizer& optimizer, std::string_view optimizer_name,
                  const std::unordered_map<const void*, std::string>& names,
                  const std::function<void()>& load) {
  SetAside earlier(optimizer);
  load_archive(optimizer_name, load);
  size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    const auto* const options = dynamic_cast<const Options*>(&group.options());
    for (const at::Tensor& parameter : group.params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      const Place place = {optimizer_name, index++,
                           name == names.end() ? std::string_view() : name->second};
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end() || options == nullptr) continue;
      if (found->second == nullptr) refuse_empty_state(place);
      auto& state = static_cast<State&>(*found->second);
      visit_state_tensors(state, [&](const char* key, const at::Tensor& tensor) {
        needs(*options, key) ? check_needed(parameter, tensor, key, place)
                             : check_not_needed(tensor, key, place);
      });
      if constexpr (requires { state.step() < 0; }) check_num_steps(state.step(), place);
    }
  }
  earlier.keep_loaded();
}

}  // namespace cadre::optim_state
