// Which optimizer a verification steps with, by its options: torch::optim's alone, and on ranks
// Cadre's of the same rule, where there is one.
//
// Threads: types only. For an optimizer of your own that works element by element, specialize
// VerifiedOptimizer for its options.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "cadre/optim/optimizers.h"

namespace cadre {

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
  using OnRanks = torch::optim::Adagrad;
};

template <typename Options>
concept VerifiableOptions = requires { typename VerifiedOptimizer<Options>::Plain; };

}  // namespace cadre
