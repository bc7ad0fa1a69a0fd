// How far a step is from the reference's, and where it is farthest.
//
// Threads: one. Blocking: never. Lifetime: keeps no tensor. Errors: kInvalidArgument where a
// training has other parameters than the reference.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/verify/reference_run.h"
#include "cadre/verify/verify_report.h"

namespace cadre {

// A deviation, and the share of its bound that it uses: infinite for NaN, and for any difference
// where the bound is 0.
struct UsedBound {
  double share = -1;  // nothing compared so far
  Deviation deviation;
};

// Keeps the one that says more: of two that exceed their bounds the one of the earlier step,
// because what follows it is its consequence; else the one with the larger share; of equal ones the
// first.
void keep_worse(UsedBound& kept, const UsedBound& other);

class Comparison {
 public:
  Comparison(const ReferenceRun& reference, int rank) : reference_(reference), rank_(rank) {}

  // step: from 1.
  void add_loss(int64_t step, double loss);
  void add_gradients(int64_t step, std::span<const NamedTensor> gradients);
  void add_parameters(int64_t step, std::span<const NamedTensor> parameters);

  // Of this rank: of losses, gradients and parameters.
  const UsedBound& loss() const { return loss_; }
  const UsedBound& gradients() const { return gradients_; }
  const UsedBound& parameters() const { return parameters_; }

 private:
  void add(UsedBound& kept, std::span<const ReferenceTensor> expected,
           std::span<const NamedTensor> actual, int64_t step) const;

  const ReferenceRun& reference_;
  int rank_;
  UsedBound loss_;
  UsedBound gradients_;
  UsedBound parameters_;
};

}  // namespace cadre
