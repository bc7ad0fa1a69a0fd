// A training that a verification runs step by step, reading its values after each part of a step.
//
// Threads: one. Blocking: every method may be collective, so all ranks must call the same methods.
// Errors: cadre::Error, and any exceptions of the user's module and functions.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::verify {

// Updates parameters from their gradients.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // `step` is counted from 1.
  virtual void update(int64_t step) = 0;
};

class SteppedTraining : public UpdateRule {
 public:
  // Computes forward and backward of this step's batch, and leaves the gradients for update().
  // Returns the mean loss over the rows of the whole batch, equal on all ranks.
  virtual double backward(int64_t step) = 0;
  // Return every parameter, or its gradient, as a whole tensor under its name in the plain module,
  // on all ranks. A gradient may be undefined. The result is valid until the next call.
  virtual std::vector<NamedTensor> gradients() = 0;
  virtual std::vector<NamedTensor> parameters() = 0;
  // Is called after an update. Returns the buffers as whole tensors by name, which must equal those
  // of a training in one process. Returns an empty list if this training computes a step in several
  // forwards, because a buffer may change in each of them.
  virtual std::vector<NamedTensor> buffers() { return {}; }
  // Is called after the last step, unless the training failed. Closes the groups that the training
  // has created: destroyed without it, they would abort what other ranks still run in them.
  virtual void close() {}
};

// Return the parameters of a module, each once, and their gradients.
CADRE_EXPORT std::vector<NamedTensor> whole_parameters(const torch::nn::Module& module);
CADRE_EXPORT std::vector<NamedTensor> whole_gradients(const torch::nn::Module& module);

// The plain module and its optimizer in one process, on the whole batch.
class ReferenceTraining : public SteppedTraining {
 public:
  // Returns an optimizer of the same kind and options with new state, for other tensors of the same
  // names and sizes.
  virtual std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) = 0;
};

}  // namespace cadre::verify
