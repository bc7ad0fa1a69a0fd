// Maps the type of optimizer options to the optimizer that Cadre makes of them.
//
// Threads: types only. To train with your own optimizer, which must work element by element,
// specialize OptimizerOf for its options.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "cadre/tensor/optim/optimizers.h"

namespace cadre {

template <typename Options>
struct OptimizerOf;

template <>
struct OptimizerOf<torch::optim::AdamWOptions> {
  using Type = AdamW;
};
template <>
struct OptimizerOf<torch::optim::AdamOptions> {
  using Type = Adam;
};
template <>
struct OptimizerOf<torch::optim::SGDOptions> {
  using Type = SGD;
};
template <>
struct OptimizerOf<torch::optim::RMSpropOptions> {
  using Type = torch::optim::RMSprop;
};
template <>
struct OptimizerOf<torch::optim::AdagradOptions> {
  using Type = Adagrad;
};
template <>
struct OptimizerOf<AdadeltaOptions> {
  using Type = Adadelta;
};

template <typename Options>
concept OptionsOfOptimizer = requires { typename OptimizerOf<Options>::Type; };

}  // namespace cadre
