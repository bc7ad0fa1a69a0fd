#include "cadre/parallel/buckets/gradient_memory.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace cadre::gradient_memory_test {
namespace {

using Buffers = std::vector<std::pair<at::ScalarType, int64_t>>;

Buffers plain(const std::vector<shard::FlatBuffer>& buffers) {
  Buffers result;
  for (const shard::FlatBuffer& buffer : buffers) result.emplace_back(buffer.dtype, buffer.numel);
  return result;
}

ShardedBucketSize bucket_of(int64_t numel, at::ScalarType reduce_dtype, at::ScalarType dtype) {
  return {.numel = numel,
          .gradients = {.numel = numel / 2, .dtype = dtype},
          .reduce_dtype = reduce_dtype};
}

TEST(GradientMemory, TheLastReplicatedBufferEndsWithTheTrailer) {
  const std::vector<ParameterSize> parameters = {
      {.sizes = {4, 3}}, {.sizes = {5}}, {.sizes = {2}, .dtype = DType::kFloat64}};
  const BucketLayout layout = {.buckets = {{.dtype = DType::kFloat64, .parameters = {2}},
                                           {.dtype = DType::kFloat32, .parameters = {1, 0}}}};
  EXPECT_EQ(plain(replicated_buffers(layout, parameters, 9)),
            (Buffers{{at::kDouble, 2}, {at::kFloat, 5 + 12 + 9}}));
  EXPECT_TRUE(replicated_buffers({}, parameters, 9).empty()) << "no bucket, no trailer";
}

TEST(GradientMemory, TwoBuffersOfEachDtypeHoldItsLargestBucket) {
  const std::vector<ShardedBucketSize> buckets = {
      bucket_of(10, at::kFloat, at::kFloat), bucket_of(30, at::kFloat, at::kFloat),
      bucket_of(20, at::kFloat, at::kFloat), bucket_of(8, at::kDouble, at::kDouble)};
  EXPECT_EQ(plain(reduction_buffers(buckets)),
            (Buffers{{at::kFloat, 30}, {at::kFloat, 30}, {at::kDouble, 8}}));
}

TEST(GradientMemory, OutputsAreOfBucketsThatAreNotReducedInPlace) {
  // The first three buckets have bfloat16 gradients that are reduced in float32; their shards have
  // 5, 15 and 10 elements. The fourth bucket is reduced in place and needs no output.
  const std::vector<ShardedBucketSize> buckets = {
      bucket_of(10, at::kFloat, at::kBFloat16), bucket_of(30, at::kFloat, at::kBFloat16),
      bucket_of(20, at::kFloat, at::kBFloat16), bucket_of(40, at::kFloat, at::kFloat)};
  EXPECT_EQ(plain(output_buffers(buckets, /*has_replicas=*/false)),
            (Buffers{{at::kFloat, 15}, {at::kFloat, 10}}));
  EXPECT_EQ(plain(output_buffers(buckets, /*has_replicas=*/true)),
            (Buffers{{at::kFloat, 15}, {at::kFloat, 10}, {at::kFloat, 5}}));
}

}  // namespace
}  // namespace cadre::gradient_memory_test
