// Sizes of the buffers in which gradients are reduced and kept. ReplicatedGradients and
// ShardedGradients allocate these buffers, and a memory plan adds them up.
//
// Threads: pure functions. Errors: none.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/shard/flat_layout.h"

namespace cadre {

// By bucket: the buffer of its gradients, which in the last bucket ends with the trailer.
std::vector<shard::FlatBuffer> replicated_buffers(const BucketLayout& layout,
                                                  std::span<const ParameterSize> parameters,
                                                  int64_t trailer_numel);

// A bucket of sharded gradients: those of one FlatParameters.
struct ShardedBucketSize {
  int64_t numel = 0;                 // elements that are reduced, padding included
  shard::FlatBuffer gradients = {};  // this rank's shard of them, which is kept
  at::ScalarType reduce_dtype = at::kFloat;

  // Whether the result of a reduction may be written to the gradients directly.
  bool is_reduced_in_place() const { return reduce_dtype == gradients.dtype; }
  shard::FlatBuffer output() const { return {.numel = gradients.numel, .dtype = reduce_dtype}; }
};

// For each dtype of a reduction: one buffer is filled while the other one is reduced.
inline constexpr size_t kNumReductionBuffers = 2;
// All buffers that are reduced. Those of one dtype are used in turn, so each can hold the largest
// bucket of that dtype.
std::vector<shard::FlatBuffer> reduction_buffers(std::span<const ShardedBucketSize> buckets);
// The most outputs that exist at the same time where gradients are not reduced in place: those of
// the buffers in use, or those of all buckets if an all_reduce over replicas follows.
std::vector<shard::FlatBuffer> output_buffers(std::span<const ShardedBucketSize> buckets,
                                              bool has_replicas);

}  // namespace cadre
