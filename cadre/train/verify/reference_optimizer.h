// Maps the type of optimizer options to the optimizer of the reference run: the one of
// torch::optim, or Cadre's if torch::optim has none. On the ranks a verification uses OptimizerOf.
//
// Threads: types only. To verify your own elementwise optimizer, specialize OptimizerOf for its
// options; it is then the optimizer of the reference, too.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "cadre/tensor/optim/optimizer_of.h"

namespace cadre::verify {

template <typename Options>
struct ReferenceOptimizer {
  using Type = typename OptimizerOf<Options>::Type;
};

template <>
struct ReferenceOptimizer<torch::optim::AdamWOptions> {
  using Type = torch::optim::AdamW;
};
template <>
struct ReferenceOptimizer<torch::optim::AdamOptions> {
  using Type = torch::optim::Adam;
};
template <>
struct ReferenceOptimizer<torch::optim::SGDOptions> {
  using Type = torch::optim::SGD;
};
template <>
struct ReferenceOptimizer<torch::optim::AdagradOptions> {
  using Type = torch::optim::Adagrad;
};

}  // namespace cadre::verify
