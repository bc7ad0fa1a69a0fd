// The reference: the steps of training in one process, which every rank holds, and the bounds that
// are derived from them.
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

// One entry for each parameter. Bounds are relative to the scale.
struct ReferenceTensor {
  at::Tensor values;    // undefined: no gradient
  double scale = 0;     // 0: every value is 0, and must be 0 on the ranks
  double bound = 0;     // for every element, unless there are bounds by element
  at::Tensor bounds{};  // by element, with the values' sizes; or undefined
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
  bool has_gradients = false;       // one that is not 0, in a step
  bool changes_parameters = false;  // the last step has others than the first began with
};

// make_reference: called on every rank. Rank 0 trains, in a world of one process, and broadcasts
// the results. kInvalidArgument on all ranks for what the training throws, a module without
// parameters, and a loss that is not finite.
ReferenceRun run_reference(const ProcessGroup& world, const VerificationProgram& program,
                           const VerificationOptions& options);

}  // namespace cadre::verify
