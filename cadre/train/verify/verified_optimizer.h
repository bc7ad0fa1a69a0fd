// Maps optimizer options to the optimizers of a verification: the optimizer of torch::optim for the
// reference, and Cadre's counterpart on the ranks, if there is one.
//
// Threads: types only. For your own elementwise optimizer, specialize VerifiedOptimizer for its
// options.
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
