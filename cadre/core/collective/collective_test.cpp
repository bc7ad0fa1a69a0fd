// Tests which collectives validate() accepts and which it refuses on rank 1 of 3.
#include "cadre/core/collective/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cadre/core/collective/reduction_table.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

constexpr int kWorldSize = 3;
constexpr Rank kSelf = 1;

// The buffers of a rank: one for the six int32 of this rank, and one for the six int32 of each
// rank.
struct Buffers {
  std::array<std::byte, 24> part{};
  std::array<std::byte, 24> other_part{};
  std::array<std::byte, 72> whole{};

  ConstBytes in() const { return part; }
  Bytes out() { return other_part; }
  // Returns the slice of `whole` that belongs to this rank.
  Bytes slice() { return Bytes(whole).subspan(24, 24); }
};

std::string refusal_of(Collective collective, Rank rank = kSelf, int world_size = kWorldSize) {
  const auto descriptor = validate(collective, rank, world_size);
  if (descriptor.ok()) return "";
  EXPECT_EQ(descriptor.error().code(), ErrorCode::kInvalidArgument);
  return descriptor.error().message();
}

OpDescriptor descriptor_of(Collective collective) {
  return validate(collective, kSelf, kWorldSize).value_or_throw();
}

TEST(Collective, TheDescriptorIsWhatRanksCompare) {
  Buffers b;
  const auto text = [](const Collective& collective) {
    return descriptor_of(collective).to_string();
  };
  constexpr DType kType = DType::kInt32;
  EXPECT_EQ(text(Collective::barrier()), "barrier()");
  EXPECT_EQ(text(Collective::broadcast(b.part, kType, 2)), "broadcast(int32 x 6, root 2)");
  EXPECT_EQ(text(Collective::all_reduce(b.in(), b.out(), kType, ReduceOp::kMax)),
            "all_reduce(max, int32 x 6)");
  EXPECT_EQ(text(Collective::all_gather(b.in(), b.whole, kType)), "all_gather(int32 x 6)");
  EXPECT_EQ(text(Collective::reduce_scatter(b.whole, b.out(), kType, ReduceOp::kSum)),
            "reduce_scatter(sum, int32 x 6)");
  EXPECT_EQ(text(Collective::reduce(b.in(), b.out(), kType, ReduceOp::kMin, 1)),
            "reduce(min, int32 x 6, root 1)");
  EXPECT_EQ(text(Collective::gather(b.in(), b.whole, kType, 1)), "gather(int32 x 6, root 1)");
  EXPECT_EQ(text(Collective::scatter(b.whole, b.out(), kType, 1)), "scatter(int32 x 6, root 1)");
  EXPECT_EQ(text(Collective::all_to_all(b.in(), b.out(), kType)), "all_to_all(int32 x 6)");
  EXPECT_EQ(text(Collective::all_to_all_v(b.in(), b.out(), kType, {{1, 2, 3}, {6, 0, 0}})),
            "all_to_all_v(int32)");
  Collective shaped = Collective::all_reduce(b.in(), b.out(), kType, ReduceOp::kSum);
  const std::array<int64_t, 2> sizes = {2, 3};
  shaped.shape = sizes;
  EXPECT_EQ(text(shaped), "all_reduce(sum, int32 x [2, 3])");
}

// validate() sets a buffer that only the root uses to empty on other ranks, so that no engine can
// use it there.
TEST(Collective, BuffersThatOnlyTheRootUsesAreDroppedElsewhere) {
  Buffers b;
  for (const Rank root : {0, 1}) {
    const bool is_root = root == kSelf;
    Collective reduce = Collective::reduce(b.in(), b.out(), DType::kInt32, ReduceOp::kSum, root);
    Collective gather = Collective::gather(b.in(), b.whole, DType::kInt32, root);
    Collective scatter = Collective::scatter(b.whole, b.out(), DType::kInt32, root);
    for (Collective* collective : {&reduce, &gather, &scatter}) {
      ASSERT_TRUE(validate(*collective, kSelf, kWorldSize).ok());
    }
    EXPECT_EQ(reduce.out.empty(), !is_root);
    EXPECT_EQ(gather.out.empty(), !is_root);
    EXPECT_EQ(scatter.in.empty(), !is_root);
    EXPECT_FALSE(reduce.in.empty() || gather.in.empty() || scatter.out.empty());
  }
  // The output of a gather may have any size on ranks other than the root.
  EXPECT_EQ(refusal_of(Collective::gather(b.in(), {}, DType::kInt32, 0)), "");
  EXPECT_THAT(refusal_of(Collective::gather(b.in(), {}, DType::kInt32, 1)),
              HasSubstr("the output has 0 bytes, expected 72"));
}

TEST(Collective, BuffersOfOtherSizesAreRefusedWithBoth) {
  Buffers b;
  constexpr DType kType = DType::kInt32;
  const Bytes short_one = Bytes(b.other_part).first(20);
  EXPECT_EQ(refusal_of(Collective::all_reduce(b.in(), short_one, kType, ReduceOp::kSum)),
            "all_reduce: the output has 20 bytes, expected 24");
  EXPECT_EQ(refusal_of(Collective::all_gather(b.in(), Bytes(b.whole).first(48), kType)),
            "all_gather: the output has 48 bytes, expected 72");
  EXPECT_EQ(refusal_of(Collective::reduce_scatter(b.in(), b.out(), kType, ReduceOp::kSum)),
            "reduce_scatter: the input has 24 bytes, expected 72");
  EXPECT_EQ(refusal_of(Collective::scatter(b.in(), b.out(), kType, 1)),
            "scatter: the input has 24 bytes, expected 72");
  EXPECT_EQ(refusal_of(Collective::broadcast(Bytes(b.part).first(6), kType, 0)),
            "broadcast: 6 bytes are not a whole number of int32 elements of 4 bytes");
  EXPECT_EQ(refusal_of(Collective::all_to_all(b.in().first(16), b.out().first(16), kType)),
            "all_to_all: 4 elements cannot be divided evenly among 3 ranks; use all_to_all_v");
}

TEST(Collective, OnlyTheSameMemoryOrThisRanksSliceIsInPlace) {
  Buffers b;
  constexpr DType kType = DType::kInt32;
  const Bytes shifted = Bytes(b.whole).subspan(28, 24);
  EXPECT_EQ(refusal_of(Collective::all_gather(b.slice(), b.whole, kType)), "");
  EXPECT_EQ(refusal_of(Collective::reduce_scatter(b.whole, b.slice(), kType, ReduceOp::kSum)), "");
  EXPECT_EQ(refusal_of(Collective::all_reduce(b.slice(), b.slice(), kType, ReduceOp::kSum)), "");
  for (const Collective& overlapping :
       {Collective::all_gather(shifted, b.whole, kType),
        Collective::all_gather(Bytes(b.whole).first(24), b.whole, kType),
        Collective::reduce_scatter(b.whole, shifted, kType, ReduceOp::kSum),
        Collective::all_reduce(b.slice(), shifted, kType, ReduceOp::kSum),
        Collective::scatter(b.whole, shifted, kType, 1)}) {
    EXPECT_THAT(refusal_of(overlapping), HasSubstr("overlap, but not in place"));
  }
  EXPECT_THAT(refusal_of(Collective::all_to_all(b.slice(), b.slice(), kType)),
              HasSubstr("the input and the output overlap; pass separate buffers"));
  Collective two = Collective::broadcast(b.out(), kType, 0);
  two.in = b.in();
  EXPECT_THAT(refusal_of(two), HasSubstr("different buffers"));
}

TEST(Collective, SplitsAddUpToTheBuffers) {
  Buffers b;
  const auto refusal = [&](const SplitCounts& splits) {
    return refusal_of(Collective::all_to_all_v(b.in(), b.out(), DType::kInt32, splits));
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(refusal({{6, 0, 0}, {2, 2, 2}}), "");
  EXPECT_THAT(refusal({{6, 0}, {2, 2, 2}}), HasSubstr("2 counts for the input"));
  EXPECT_THAT(refusal({{6, 0, 0}, {2, 2, 1}}), HasSubstr("the output add up to 5, but it has 6"));
  EXPECT_THAT(refusal({{7, kHuge, 0}, {2, 2, 2}}), HasSubstr("more than its 6 int32"));
  EXPECT_THAT(refusal({{3, kHuge, 4}, {2, 2, 2}}), HasSubstr("more than its 6 int32"));
}

TEST(Collective, TheCountsOfAnUnevenGatherAreItsShape) {
  Buffers b;
  const auto gather = [&](ConstBytes in, Bytes out, std::vector<uint64_t> counts) {
    return Collective::all_gather_v(in, out, DType::kInt32, std::move(counts));
  };
  const Bytes out = Bytes(b.whole).first(44);
  EXPECT_EQ(descriptor_of(gather(b.in(), out, {5, 6, 0})).to_string(),
            "all_gather_v(int32 x [5, 6, 0])");
  EXPECT_EQ(refusal_of(gather(out.subspan(20, 24), out, {5, 6, 0})), "");
  EXPECT_THAT(refusal_of(gather(out.subspan(16, 24), out, {5, 6, 0})),
              HasSubstr("overlap, but not in place"));
  EXPECT_EQ(refusal_of(gather(b.in(), out, {6, 5, 0})),
            "all_gather_v: the input has 24 bytes, expected 20");
  EXPECT_THAT(refusal_of(gather(b.in(), out, {5, 6, 1})), HasSubstr("more than its 11 int32"));
  EXPECT_THAT(refusal_of(gather(b.in(), out, {5, 6})), HasSubstr("2 counts for the output"));
}

TEST(Collective, TheCountsOfAnUnevenReduceScatterAreItsShape) {
  Buffers b;
  const auto scatter = [&](ConstBytes in, Bytes out, std::vector<uint64_t> counts,
                           Reduction reduction = ReduceOp::kMax) {
    return Collective::reduce_scatter_v(in, out, DType::kInt32, reduction, std::move(counts));
  };
  const Bytes in = Bytes(b.whole).first(44);
  EXPECT_EQ(descriptor_of(scatter(in, b.part, {5, 6, 0})).to_string(),
            "reduce_scatter_v(max, int32 x [5, 6, 0])");
  EXPECT_EQ(refusal_of(scatter(in, in.subspan(20, 24), {5, 6, 0})), "");
  EXPECT_THAT(refusal_of(scatter(in, in.subspan(16, 24), {5, 6, 0})),
              HasSubstr("overlap, but not in place"));
  EXPECT_EQ(refusal_of(scatter(in, b.part, {6, 5, 0})),
            "reduce_scatter_v: the output has 24 bytes, expected 20");
  EXPECT_THAT(refusal_of(scatter(in, b.part, {5, 6, 1})), HasSubstr("more than its 11 int32"));
  EXPECT_THAT(refusal_of(scatter(in, b.part, {5, 6})), HasSubstr("2 counts for the input"));
  EXPECT_THAT(refusal_of(scatter(in, b.part, {5, 6, 0}, ReduceOp::kAvg)),
              HasSubstr("avg of int32"));
  EXPECT_THAT(refusal_of(Collective::reduce_scatter_v(in, b.part, DType::kFloat32,
                                                      ReduceOp::kPremulSum, {5, 6, 0})),
              HasSubstr("needs this rank's factor"));
}

TEST(Collective, ARootOutsideTheGroupAndAnotherShapeAreRefused) {
  Buffers b;
  for (const Rank root : {-1, kWorldSize}) {
    EXPECT_EQ(refusal_of(Collective::broadcast(b.part, DType::kInt32, root)),
              "broadcast: root " + std::to_string(root.value) + " is not in the group of 3 ranks");
  }
  Collective shaped = Collective::all_gather(b.in(), b.whole, DType::kInt32);
  const std::array<int64_t, 2> sizes = {2, 9};
  shaped.shape = sizes;
  EXPECT_THAT(refusal_of(shaped), HasSubstr("the shape has 18 elements"));
}

TEST(Collective, WhatTheReductionTableRefusesIsRefusedWithItsSentence) {
  std::array<std::byte, 8> data{};
  int num_refused = 0;
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      const Reduction reduction = op == ReduceOp::kPremulSum ? Reduction::premul_sum(2) : op;
      const Status rule = check_reduction(dtype, op);
      num_refused += rule.ok() ? 0 : 1;
      for (const Collective& collective : {Collective::all_reduce(data, data, dtype, reduction),
                                           Collective::reduce_scatter(data, data, dtype, reduction),
                                           Collective::reduce(data, data, dtype, reduction, 0)}) {
        const std::string refusal = refusal_of(collective, 0, 1);
        EXPECT_EQ(refusal.empty(), rule.ok());
        if (!rule.ok()) {
          EXPECT_THAT(refusal, HasSubstr(": " + rule.error().message()));
        }
      }
    }
  }
  EXPECT_EQ(num_refused, 24);  // otherwise the loop has tested no error
  EXPECT_THAT(
      refusal_of(Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kPremulSum), 0, 1),
      HasSubstr("needs this rank's factor; pass Reduction::premul_sum(factor)"));
}

}  // namespace
}  // namespace cadre
