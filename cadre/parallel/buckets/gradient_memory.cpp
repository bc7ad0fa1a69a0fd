#include "cadre/parallel/buckets/gradient_memory.h"

#include <algorithm>
#include <functional>
#include <map>

#include "cadre/tensor/group/operands/dtype.h"

namespace cadre {

namespace {

using ByDtype = std::map<at::ScalarType, std::vector<int64_t>>;

// Returns the `count` largest buffers of each dtype, or all if there are fewer.
std::vector<shard::FlatBuffer> largest(ByDtype numels, size_t count) {
  std::vector<shard::FlatBuffer> buffers;
  for (auto& [dtype, sizes] : numels) {
    std::ranges::sort(sizes, std::greater());
    sizes.resize(std::min(sizes.size(), count));
    for (const int64_t numel : sizes) buffers.push_back({.numel = numel, .dtype = dtype});
  }
  return buffers;
}

}  // namespace

std::vector<shard::FlatBuffer> replicated_buffers(const BucketLayout& layout,
                                                  std::span<const ParameterSize> parameters,
                                                  int64_t trailer_numel) {
  std::vector<shard::FlatBuffer> buffers;
  for (const BucketLayout::Bucket& bucket : layout.buckets) {
    shard::FlatBuffer& buffer = buffers.emplace_back();
    buffer.dtype = to_scalar_type(bucket.dtype);
    for (const int64_t index : bucket.parameters) buffer.numel += parameters[index].numel();
  }
  if (!buffers.empty()) buffers.back().numel += trailer_numel;
  return buffers;
}

std::vector<shard::FlatBuffer> reduction_buffers(std::span<const ShardedBucketSize> buckets) {
  ByDtype numels;
  for (const ShardedBucketSize& bucket : buckets) {
    numels[bucket.reduce_dtype].push_back(bucket.numel);
  }
  std::vector<shard::FlatBuffer> buffers = largest(numels, kNumReductionBuffers);
  // The buffers are used alternately, so each must have the size of the largest bucket.
  for (shard::FlatBuffer& buffer : buffers) buffer.numel = std::ranges::max(numels[buffer.dtype]);
  return buffers;
}

std::vector<shard::FlatBuffer> output_buffers(std::span<const ShardedBucketSize> buckets,
                                              bool has_replicas) {
  ByDtype numels;
  for (const ShardedBucketSize& bucket : buckets) {
    if (!bucket.is_reduced_in_place()) numels[bucket.reduce_dtype].push_back(bucket.output().numel);
  }
  return largest(numels, has_replicas ? buckets.size() : kNumReductionBuffers);
}

}  // namespace cadre
