// Compares a step of a training with that of the reference, and finds the largest deviation.
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

// A deviation and `share`, its ratio to its bound. The ratio is infinite for NaN, and for any
// difference if the bound is 0.
struct UsedBound {
  double share = -1;  // -1 if nothing has been compared
  Deviation deviation;
};

// Keeps the more significant of two deviations. If both exceed their bounds, that is the one of the
// earlier step, because later deviations follow from it; otherwise the one with the larger ratio;
// if the ratios are equal, `kept`.
void keep_worse(UsedBound& kept, const UsedBound& other);

class Comparison {
 public:
  Comparison(const ReferenceRun& reference, int rank) : reference_(reference), rank_(rank) {}

  // `step` is counted from 1.
  void add_loss(int64_t step, double loss);
  void add_gradients(int64_t step, std::span<const NamedTensor> gradients);
  void add_parameters(int64_t step, std::span<const NamedTensor> parameters);
  // Compares nothing if the training returns no buffers.
  void add_buffers(int64_t step, std::span<const NamedTensor> buffers);

  // The largest deviations on this rank: of losses, gradients, parameters and buffers.
  const UsedBound& loss() const { return loss_; }
  const UsedBound& gradients() const { return gradients_; }
  const UsedBound& parameters() const { return parameters_; }
  const UsedBound& buffers() const { return buffers_; }

 private:
  // The tensors of one step, of the reference and of this training, by name.
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
