// Compares each step of a training with the same step of the reference run, and keeps the largest
// deviation.
//
// Threads: one. Lifetime: keeps no tensor. Errors: kInvalidArgument if a training has other
// parameters or buffers than the reference.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/train/verify/reference_run.h"
#include "cadre/train/verify/verify_report.h"

namespace cadre::verify {

// A deviation, and `share`: the ratio of its difference to its bound, so that more than 1 exceeds
// the bound. The ratio is infinite for NaN, and for any difference from 0 if the bound is 0.
struct UsedBound {
  double share = -1;  // -1 if no value has been compared
  Deviation deviation;
};

// Replaces `kept` by `other` if that is the worse deviation. If both exceed their bounds, the one
// of the earlier step is worse, because later deviations follow from it; otherwise the one with the
// larger ratio. If the ratios are equal, `kept` stays.
void keep_worse(UsedBound& kept, const UsedBound& other);

class Comparison {
 public:
  Comparison(const ReferenceRun& reference, int rank) : reference_(reference), rank_(rank) {}

  // `step` is counted from 1.
  void add_loss(int64_t step, double loss);
  void add_gradients(int64_t step, std::span<const NamedTensor> gradients);
  void add_parameters(int64_t step, std::span<const NamedTensor> parameters);
  // Compares no buffers if the training returns none.
  void add_buffers(int64_t step, std::span<const NamedTensor> buffers);

  // Return the largest deviation on this rank: of the losses, gradients, parameters and buffers.
  const UsedBound& loss() const { return loss_; }
  const UsedBound& gradients() const { return gradients_; }
  const UsedBound& parameters() const { return parameters_; }
  const UsedBound& buffers() const { return buffers_; }

 private:
  // The tensors of one step by name: those of the reference, and those of this training.
  struct Tensors {
    const char* kind;  // "parameter" or "buffer", for messages
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
