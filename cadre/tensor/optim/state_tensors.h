// Gives access by name to the tensors in the optimizer state classes of libtorch and Cadre.
//
// Threads: plain functions. Blocking: never. Lifetime: keeps nothing. Errors: none.
// Names are those of torch.optim. The namespace is not cadre::optim: after `using namespace torch`
// and `using namespace cadre`, optim::SGD would be ambiguous.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <type_traits>

#include "cadre/tensor/optim/optimizers.h"

namespace cadre::optim_state {

// The state class of the optimizer O, which is a class of libtorch or Cadre or derived from one;
// void for any other O.
template <typename O>
using StateOf = std::conditional_t<
    std::is_base_of_v<torch::optim::AdamW, O>, torch::optim::AdamWParamState,
    std::conditional_t<
        std::is_base_of_v<torch::optim::Adam, O>, torch::optim::AdamParamState,
        std::conditional_t<
            std::is_base_of_v<torch::optim::SGD, O>, torch::optim::SGDParamState,
            std::conditional_t<std::is_base_of_v<torch::optim::RMSprop, O>,
                               torch::optim::RMSpropParamState,
                               std::conditional_t<std::is_base_of_v<torch::optim::Adagrad, O>,
                                                  torch::optim::AdagradParamState,
                                                  std::conditional_t<std::is_base_of_v<Adadelta, O>,
                                                                     AdadeltaParamState, void>>>>>>;

// The options class of the optimizer O; void for an O that is not known.
template <typename O>
using OptionsOf = std::conditional_t<
    std::is_base_of_v<torch::optim::AdamW, O>, torch::optim::AdamWOptions,
    std::conditional_t<
        std::is_base_of_v<torch::optim::Adam, O>, torch::optim::AdamOptions,
        std::conditional_t<
            std::is_base_of_v<torch::optim::SGD, O>, torch::optim::SGDOptions,
            std::conditional_t<
                std::is_base_of_v<torch::optim::RMSprop, O>, torch::optim::RMSpropOptions,
                std::conditional_t<
                    std::is_base_of_v<torch::optim::Adagrad, O>, torch::optim::AdagradOptions,
                    std::conditional_t<std::is_base_of_v<Adadelta, O>, AdadeltaOptions, void>>>>>>;

inline constexpr int64_t kStepsOfMark = 1024;  // mark_of_state() contains step * kStepsOfMark

// Calls visit(name, tensor) for each tensor member of the state class, also if it is undefined.
template <typename State, typename Visit>
void visit_state_tensors(State& state, Visit visit) {
  if constexpr (requires { state.exp_avg(); }) visit("exp_avg", state.exp_avg());
  if constexpr (requires { state.exp_avg_sq(); }) visit("exp_avg_sq", state.exp_avg_sq());
  if constexpr (requires { state.max_exp_avg_sq(); }) {
    visit("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  if constexpr (requires { state.momentum_buffer(); }) {
    visit("momentum_buffer", state.momentum_buffer());
  }
  if constexpr (requires { state.square_avg(); }) visit("square_avg", state.square_avg());
  if constexpr (requires { state.acc_delta(); }) visit("acc_delta", state.acc_delta());
  if constexpr (requires { state.grad_avg(); }) visit("grad_avg", state.grad_avg());
  if constexpr (requires { state.sum(); }) visit("sum", state.sum());
}

// Returns a number that encodes which state tensors the optimizer has for a leaf, and its step
// number, so that ranks can compare them; 0 without a state.
template <typename O>
int64_t mark_of_state(const O& optimizer, const at::Tensor& leaf) {
  const auto found = optimizer.state().find(leaf.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return 0;
  int64_t mark = 1;
  if constexpr (!std::is_void_v<StateOf<O>>) {
    const auto& state = static_cast<const StateOf<O>&>(*found->second);
    visit_state_tensors(state, [&mark](const char*, const at::Tensor& tensor) {
      mark = 2 * mark + (tensor.defined() ? 1 : 0);
    });
    if constexpr (requires { state.step(); }) mark += state.step() * kStepsOfMark;
  }
  return mark;
}

}  // namespace cadre::optim_state
