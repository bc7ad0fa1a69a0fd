// A training that a verification drives step by step, and whose values it reads after each part of
// a step.
//
// Threads: one. Blocking: every method may be collective; all ranks call the same. Errors:
// cadre::Error, and whatever the user's module and functions throw.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/wrap/named_tensors.h"

namespace cadre {

// Changes parameters by their gradients.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // step: from 1.
  virtual void update(int64_t step) = 0;
};

class SteppedTraining : public UpdateRule {
 public:
  // Forward and backward of the batch of this step. Leaves the gradients as update() takes them;
  // returns the mean loss over the rows of the whole batch, the same on all ranks.
  virtual double backward(int64_t step) = 0;
  // Whole tensors, of every parameter of the plain module by its name there, on all ranks. A
  // gradient may be undefined. They are valid until the next call.
  virtual std::vector<NamedTensor> gradients() = 0;
  virtual std::vector<NamedTensor> parameters() = 0;
};

// The plain module and its optimizer in one process, on the whole batch.
class ReferenceTraining : public SteppedTraining {
 public:
  // The same rule, with fresh state, on other tensors of the same names and sizes.
  virtual std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) = 0;
};

}  // namespace cadre
