// The reductions that NCCL computes otherwise than reduction_table.h says, as calls of NCCL with
// kernels of libtorch before and after them.
//
// - NCCL's minimum and maximum of floating-point numbers ignore a NaN. So the ranks also reduce
//   which elements are NaN, and the result is NaN there.
// - NCCL's average multiplies each input by 1 / P. If P is no power of two, that is inexact, and
//   the result is the sum, divided by P.
// - NCCL rounds the factor of a PREMUL_SUM to the dtype. For float16 and bfloat16 each input is
//   multiplied in float32 before the sum.
// Threads: any. Blocking: never. All kernels run on the stream that is current in the thread.
// Errors: c10::Error, also if there is no memory. Numerics: a sum of float16 or bfloat16 is rounded
// to the dtype at each addition, other than that of the engines for the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"

namespace cadre::nccl {

struct PreparedCall {
  std::vector<Collective> collectives = {};
  std::vector<at::Tensor> memory = {};  // temporary buffers of the collectives
  // Enqueues what follows the collectives.
  std::vector<std::function<void()>> finish = {};
};

// Enqueues what precedes the collectives.
PreparedCall prepare(std::span<const Collective> collectives, int world_size);

}  // namespace cadre::nccl
