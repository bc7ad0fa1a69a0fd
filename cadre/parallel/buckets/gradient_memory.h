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

// Returns the buffer of each bucket's gradients; in the last bucket it ends with the trailer.
std::vector<shard::FlatBuffer> replicated_buffers(const BucketLayout& layout,
                                                  std::span<const ParameterSize> parameters,
                                                  int64_t trailer_numel);

// The sizes of a bucket of sharded gradients, which are those of one FlatParameters.
struct ShardedBucketSize {
  int64_t numel = 0;                 // the number of elements that are reduced, padding included
  shard::FlatBuffer gradients = {};  // the shard of the gradients that this rank keeps
  at::ScalarType reduce_dtype = at::kFloat;

  // Returns whether the result of a reduction may be written to the gradients directly.
  bool is_reduced_in_place() const { return reduce_dtype == gradients.dtype; }
  shard::FlatBuffer output() const { return {.numel = gradients.numel, .dtype = reduce_dtype}; }
};

// The number of buffers for each dtype of a reduction: one is filled while the other is reduced.
inline constexpr size_t kNumReductionBuffers = 2;
// Returns all buffers that are reduced. The buffers of one dtype are used in turn, so each can hold
// the largest bucket of that dtype.
std::vector<shard::FlatBuffer> reduction_buffers(std::span<const ShardedBucketSize> buckets);
// Returns the outputs that may exist at the same time if gradients are not reduced in place: one
// for each buffer in use, or one for each bucket if an all_reduce over replicas follows.
std::vector<shard::FlatBuffer> output_buffers(std::span<const ShardedBucketSize> buckets,
                                              bool has_replicas);

}  // namespace cadre
