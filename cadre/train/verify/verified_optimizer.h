// Maps the type of optimizer options to the optimizers that a verification uses: the one of
// torch::optim in the reference, and on the ranks Cadre's counterpart if there is one.
//
// Threads: types only. To verify your own elementwise optimizer, specialize VerifiedOptimizer for
// its options.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "cadre/tensor/optim/optimizers.h"

namespace cadre::verify {

template <typename Options>
struct VerifiedOptimizer;

template <>
struct VerifiedOptimizer<torch::optim::AdamWOptions> {
  using Plain = torch::optim::AdamW;
  using OnRanks = AdamW;
};
template <>
struct VerifiedOptimizer<torch::optim::AdamOptions> {
  using Plain = torch::optim::Adam;
  using OnRanks = Adam;
};
template <>
struct VerifiedOptimizer<torch::optim::SGDOptions> {
  using Plain = torch::optim::SGD;
  using OnRanks = SGD;
};
template <>
struct VerifiedOptimizer<torch::optim::RMSpropOptions> {
  using Plain = torch::optim::RMSprop;
  using OnRanks = torch::optim::RMSprop;
};
template <>
struct VerifiedOptimizer<torch::optim::AdagradOptions> {
  using Plain = torch::optim::Adagrad;
  using OnRanks = Adagrad;
};
template <>
struct VerifiedOptimizer<AdadeltaOptions> {
  using Plain = Adadelta;
  using OnRanks = Adadelta;
};

template <typename Options>
concept VerifiableOptions = requires { typename VerifiedOptimizer<Options>::Plain; };

}  // namespace cadre::verify
