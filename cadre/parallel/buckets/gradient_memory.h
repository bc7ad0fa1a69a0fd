// Computes the sizes of the buffers in which gradients are reduced and kept. ReplicatedGradients
// and ShardedGradients allocate these buffers, and a memory plan adds up their sizes.
//
// Threads: any.
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

// Returns the buffer of each bucket. The buffer of the last bucket has trailer_numel more elements
// at its end, for the flags that ranks exchange (GradientStorage::trailer()).
std::vector<shard::FlatBuffer> replicated_buffers(const BucketLayout& layout,
                                                  std::span<const ParameterSize> parameters,
                                                  int64_t trailer_numel);

// The sizes of a bucket of sharded gradients. Such a bucket has the gradients of one
// FlatParameters.
struct ShardedBucketSize {
  int64_t numel = 0;                 // the elements that are reduced, with padding
  shard::FlatBuffer gradients = {};  // this rank's shard of the gradients
  at::ScalarType reduce_dtype = at::kFloat;

  // Returns whether a reduce_scatter may write its result directly into `gradients`.
  bool is_reduced_in_place() const { return reduce_dtype == gradients.dtype; }
  shard::FlatBuffer output() const { return {.numel = gradients.numel, .dtype = reduce_dtype}; }
};

// The number of buffers for each reduce_dtype: one is filled while the other is being reduced.
inline constexpr size_t kNumReductionBuffers = 2;
// Returns the input buffers of the reduce_scatters. The buckets of one dtype use its buffers
// alternately, so each buffer has the size of the largest bucket of that dtype.
std::vector<shard::FlatBuffer> reduction_buffers(std::span<const ShardedBucketSize> buckets);
// Returns the outputs of reduce_scatters that may exist at the same time, for buckets whose
// gradients are not reduced in place: one for each input buffer, or one for each bucket if an
// all_reduce over replicas follows.
std::vector<shard::FlatBuffer> output_buffers(std::span<const ShardedBucketSize> buckets,
                                              bool has_replicas);

}  // namespace cadre
