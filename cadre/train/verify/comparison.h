// Compares a step with that of the reference, and finds the largest deviation.
//
// Threads: one. Blocking: never. Lifetime: keeps no tensor. Errors: kInvalidArgument if a training
// has other parameters or buffers than the reference.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/train/verify/reference_run.h"
#include "cadre/train/verify/verify_report.h"

namespace cadre::verify {

// A deviation, and its ratio to its bound: infinite for NaN, and for any difference if the bound is
// 0.
struct UsedBound {
  double share = -1;  // nothing compared yet
  Deviation deviation;
};

// Keeps the more significant of two deviations: if both exceed their bounds, that of the earlier
// step, because later ones follow from it; otherwise the one with the larger ratio; if these are
// equal, the first.
void keep_worse(UsedBound& kept, const UsedBound& other);

class Comparison {
 public:
  Comparison(const ReferenceRun& reference, int rank) : reference_(reference), rank_(rank) {}

  // step: from 1.
  void add_loss(int64_t step, double loss);
  void add_gradients(int64_t step, std::span<const NamedTensor> gradients);
  void add_parameters(int64_t step, std::span<const NamedTensor> parameters);
  // Nothing is compared where the training has no buffers to compare.
  void add_buffers(int64_t step, std::span<const NamedTensor> buffers);

  // The largest deviations on this rank, of losses, gradients, parameters and buffers.
  const UsedBound& loss() const { return loss_; }
  const UsedBound& gradients() const { return gradients_; }
  const UsedBound& parameters() const { return parameters_; }
  const UsedBound& buffers() const { return buffers_; }

 private:
  // The tensors of one step, by name: of the reference and of this training.
  struct Tensors {
    const char* kind;  // "parameter"
    std::span<const std::string> names;
    std::span<const ReferenceTensor> expected;
    std::span<const NamedTensor> actual;
  };
  void add(UsedBound& kept, const Tensors& tensors, int64_t step) const;

  const ReferenceRun& reference_;
  int rank_;
  UsedBound loss_;
  UsedBound gradients_;
  UsedBound parameters_;
  UsedBound buffers_;
};

}  // namespace cadre::verify
