// The communication hooks of PyTorch, with their names.
//
//   cadre::DistributedDataParallelOptions options;
//   options.comm_hook = cadre::comm_hooks::fp16_compress();
//   cadre::DistributedDataParallel model{net, world, options};
//
// Threads, blocking: as comm_hook.h says. Lifetime: constant values; several wrappers, also of
// several ranks in one process, may use one. Errors: kInvalidArgument for options without a
// meaning. Source: torch.distributed.algorithms.ddp_comm_hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/comm_hook.h"

namespace cadre::comm_hooks {

using Hook = std::shared_ptr<const CommHook>;

// Sums the buckets, as the wrapper does without a hook.
CADRE_EXPORT Hook allreduce();

// Send gradients in 16 bits, and add them in 16 bits. float16 has the smaller rounding error,
// bfloat16 the range of float32. Buckets that have 16 bits already are summed as they are.
CADRE_EXPORT Hook fp16_compress();
CADRE_EXPORT Hook bf16_compress();
// Convert gradients to 16 bits before another hook, and its result back.
CADRE_EXPORT Hook fp16_compress_wrapper(const Hook& inner);
CADRE_EXPORT Hook bf16_compress_wrapper(const Hook& inner);

// Sends gradients in 8 bits, with a scale and a zero point for each rank and bucket, and adds them
// in float32 in the order of the ranks. Each rank receives the buckets of all ranks.
CADRE_EXPORT Hook quantize_per_tensor();

// A hook of the program, which keeps nothing that would have to be saved. name: must be equal on
// all ranks. start: is called for each bucket by every wrapper that has this hook.
CADRE_EXPORT Hook
custom(std::string name,
       std::function<FinishReduction(const GradBucket& bucket, const ProcessGroup& group)> start);

}  // namespace cadre::comm_hooks
