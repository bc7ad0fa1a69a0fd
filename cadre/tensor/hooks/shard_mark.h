// Marks a tensor that is this rank's shard of a parameter, or a parameter of this rank's pipeline
// stages, to distinguish it from a parameter that all ranks have. The gradients of marked tensors
// are not the same on all ranks, so their norm is not that of the model.
//
// Threads: as the tensor. Blocking: never. Lifetime: the mark belongs to the tensor and to the
// results of detach(); set_data() removes it. Errors: kInvalidArgument from refuse_shards() and
// refuse_shard_as_whole().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre::shard {
struct ParameterDivision;  // parallel/shard/division/parameter_division.h
}

namespace cadre::wrap {

struct ShardMark {
  // The name of the parameter in the plain module, without a wrapper.
  std::string parameter;
  // The owner of the shard, for example "in bucket 0 of DistributedDataParallel".
  std::string owner;
  int rank = 0;
  // The number of ranks among which the parameter is divided.
  int num_ranks = 1;
  // The result of part_of(). It is equal for shards that have the same elements of a parameter.
  uint64_t part = 0;
  // True if the parameter is used for the samples of several ranks at once, so that these ranks
  // have one joint loss, the mean over all their samples.
  bool has_joint_loss = false;
  // How the parameter is divided, for a wrapper around a module whose parameters are shards
  // already; null if no mesh is known.
  std::shared_ptr<const shard::ParameterDivision> division = {};
  // Identifies the ShardFence (parallel/shard/shard_fence.h) that orders updates of the shard and
  // other accesses to it; null if there is none.
  const void* fence = nullptr;
};

// Returns a number that identifies the part of `parameter` that begins at first_element. The
// parameter may be a shard itself.
CADRE_EXPORT uint64_t part_of(const at::Tensor& parameter, int64_t first_element);

CADRE_EXPORT void mark_as_shard(const at::Tensor& tensor, ShardMark mark);
// Returns the shard mark of a tensor; null for a tensor without one and for an undefined tensor.
CADRE_EXPORT const ShardMark* shard_mark_of(const at::Tensor& tensor);

// The mark of a parameter that belongs to a pipeline stage of this rank. A tensor may have a
// ShardMark, too.
struct StageMark {
  std::string parameter;  // the name in the module of the stage
  int stage = 0;
  int rank = 0;
  int num_ranks = 1;
};
CADRE_EXPORT void mark_as_of_stage(const at::Tensor& tensor, StageMark mark);

// Throws for the first parameter that is a shard or a parameter of a stage. `call` is the name of
// the program's call in the error, for example "clip_grad_norm_", and `arguments` are its arguments
// after the parameters, for example ", max_norm".
CADRE_EXPORT void refuse_shards(std::span<const at::Tensor> parameters, std::string_view call,
                                std::string_view arguments = "");

// Throws if this tensor of a module is a shard that the call would treat as the whole parameter.
CADRE_EXPORT void refuse_shard_as_whole(std::string_view name, const at::Tensor& tensor,
                                        std::string_view call, std::string_view remedy);

}  // namespace cadre::wrap
