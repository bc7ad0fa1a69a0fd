// The reference run of a verification: the steps of a training in one process, and the bounds for
// deviations that are derived from them. Every rank has a copy.
//
// Threads: one. Blocking: run_reference() is collective. Lifetime: owns its tensors.
// Errors: as run_verification().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/tensor/group/process_group.h"
#include "cadre/train/verify/verification.h"

namespace cadre::verify {

// A tensor of the reference run. Its bounds are relative to the scale.
struct ReferenceTensor {
  at::Tensor values;  // undefined for a gradient that does not exist
  double scale = 0;   // 0 if all values are 0; the values on the ranks must then be 0, too
  double bound = 0;   // the bound of every element; ignored if `bounds` is defined
  // Has a bound for each element, in the sizes of `values`. Undefined if all elements have one
  // bound.
  at::Tensor bounds{};
};

struct ReferenceStep {
  double loss = 0;
  double loss_bound = 0;
  std::vector<ReferenceTensor> gradients;
  std::vector<ReferenceTensor> parameters;
  std::vector<ReferenceTensor> buffers = {};
};

struct ReferenceRun {
  std::vector<std::string> names;
  std::vector<ReferenceStep> steps;
  std::vector<std::string> buffer_names = {};
  bool has_gradients = false;       // a gradient of some step is not 0
  bool changes_parameters = false;  // a step has changed a parameter
};

// Calls make_reference on every rank. Rank 0 trains in a world of one process and broadcasts the
// results. Throws kInvalidArgument on all ranks if the training throws, the module has no
// parameters, or a loss is not finite.
ReferenceRun run_reference(const ProcessGroup& world, const VerificationProgram& program,
                           const VerificationOptions& options);

}  // namespace cadre::verify
