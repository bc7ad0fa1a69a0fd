// The steps of the training of one process, as every rank holds them, and the bounds that follow
// from them.
//
// Threads: one. Blocking: run_reference() is collective. Lifetime: owns its tensors.
// Errors: as run_verification().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/group/process_group.h"
#include "cadre/verify/verification.h"

namespace cadre {

// By parameter. Bounds are shares of the scale.
struct ReferenceTensor {
  at::Tensor values;    // undefined: no gradient
  double scale = 0;     // 0: every value is 0, and so must be the others
  double bound = 0;     // of every element, where bounds are not by element
  at::Tensor bounds{};  // of the values' sizes; or undefined
};

struct ReferenceStep {
  double loss = 0;
  double loss_bound = 0;
  std::vector<ReferenceTensor> gradients;
  std::vector<ReferenceTensor> parameters;
};

struct ReferenceRun {
  std::vector<std::string> names;
  std::vector<ReferenceStep> steps;
};

// make_reference: on every rank. All ranks get what rank 0 has computed.
ReferenceRun run_reference(const ProcessGroup& world, const VerificationProgram& program,
                           const VerificationOptions& options);

}  // namespace cadre
