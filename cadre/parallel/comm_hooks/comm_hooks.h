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

struct PostLocalSgdOptions {
  // The ranks with which this rank reduces gradients after the start, a part of the wrapper's group
  // that has this rank; of equal sizes on all ranks. A group of one rank reduces nothing.
  ProcessGroup subgroup;
  // The number of backwards whose gradients are reduced over all ranks before.
  int64_t start_step = 0;
};
// Reduces gradients over all ranks in the first steps, and then only over a subgroup, so that the
// models of the subgroups drift apart. A ModelAverager with PeriodicAveraging and as many
// warmup_steps averages them. The means over a subgroup are weighted as those over all ranks.
// Keeps the number of steps, which a resumed run must load. Source: post_localSGD_hook; Lin et al.
// 2020, "Don't use large mini-batches, use local SGD".
CADRE_EXPORT Hook post_local_sgd(const PostLocalSgdOptions& options);

// A hook of the program, which keeps nothing that would have to be saved. name: must be equal on
// all ranks. start: is called for each bucket by every wrapper that has this hook.
CADRE_EXPORT Hook
custom(std::string name,
       std::function<FinishReduction(const GradBucket& bucket, const ProcessGroup& group)> start);

}  // namespace cadre::comm_hooks
