// A training that a verification runs step by step, reading its values after each part of a step.
//
// Threads: one. Blocking: every method may be collective; all ranks call the same. Errors:
// cadre::Error, and any exceptions of the user's module and functions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::verify {

// Updates parameters from their gradients.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // step: from 1.
  virtual void update(int64_t step) = 0;
};

class SteppedTraining : public UpdateRule {
 public:
  // Forward and backward of the batch of this step. Leaves the gradients for update(); returns the
  // mean loss over the rows of the whole batch, equal on all ranks.
  virtual double backward(int64_t step) = 0;
  // Whole tensors of every parameter, by its name in the plain module, on all ranks. A gradient may
  // be undefined. Valid until the next call.
  virtual std::vector<NamedTensor> gradients() = 0;
  virtual std::vector<NamedTensor> parameters() = 0;
  // After an update: the buffers that are to equal those of one process, whole, by name. Nothing if
  // this training computes a step in several forwards, after each of which a buffer may change.
  virtual std::vector<NamedTensor> buffers() { return {}; }
};

// The plain module and its optimizer in one process, on the whole batch.
class ReferenceTraining : public SteppedTraining {
 public:
  // The same optimizer with new state for other tensors of the same names and sizes.
  virtual std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) = 0;
};

}  // namespace cadre::verify
