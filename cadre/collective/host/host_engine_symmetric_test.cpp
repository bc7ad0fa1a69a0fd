// Operations on symmetric memory: the same bits as on private memory, and no staging.
#include <gtest/gtest.h>

#include <cstring>

#include "cadre/base/format.h"
#include "cadre/collective/host/arena.h"
#include "cadre/collective/host/host_engine_test_ranks.h"
#include "cadre/testing/equal_bytes.h"
#include "cadre/testing/reference_reduction.h"

namespace cadre {
namespace {

using testing::equal_bytes;
using testing::Inputs;
using testing::random_inputs;
using testing::RankContext;
using testing::reference_reduction;
using testing::require;
using testing::run_ranks_as_processes;
using testing::run_ranks_as_threads;

constexpr uint32_t kSegment = 3;
constexpr size_t kBytesPerRank = 8 << 20;

// Puts data `offset` bytes into this rank's slice.
Bytes place(const TestMemory& memory, Rank rank, size_t offset,
            const std::vector<std::byte>& data) {
  const Bytes target = memory.slice(rank).subspan(offset, data.size());
  std::memcpy(target.data(), data.data(), data.size());
  return target;
}

// Large operations that went through the staging left something there.
bool staging_is_untouched(const TestMemory& memory, int num_ranks) {
  const host::Arena arena(memory.arena->bytes(), num_ranks);
  const std::vector<std::byte> zeros(host::kChunkBytes);
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < host::kNumChunks; ++i) {
      if (!equal_bytes({arena.chunk(rank, i), host::kChunkBytes}, zeros)) return false;
    }
  }
  return true;
}

class SymmetricTest : public ::testing::TestWithParam<int> {};

TEST_P(SymmetricTest, AllReduceEqualsTheFormulaWithoutStaging) {
  const int num_ranks = GetParam();
  for (ReduceKind kind : testing::all_reduce_kinds()) {
    const TestMemory memory(num_ranks, kBytesPerRank);
    const Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), 70001, kind.dtype, 17);
    const std::vector<std::byte> expected = reference_reduction(inputs, kind);
    const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
      TestRank rank(context, memory.arena);
      rank.engine().register_symmetric({kSegment, memory.segment, kBytesPerRank});
      // Ranks hold their buffers at different places.
      const size_t offset = static_cast<size_t>(context.rank.value) * 4096 + 8;
      const Bytes in = place(memory, context.rank, offset, of(inputs, context.rank));
      const Bytes out = memory.slice(context.rank).subspan(kBytesPerRank / 2, in.size());
      rank.all_reduce(in, out, kind).value_or_throw();
      require(equal_bytes(in, of(inputs, context.rank)), "the input was changed");
      require(equal_bytes(out, expected), format("{} of {}", kind.op, kind.dtype));
      rank.all_reduce(in, in, kind).value_or_throw();
      require(equal_bytes(in, expected), format("in place, {} of {}", kind.op, kind.dtype));
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    EXPECT_TRUE(staging_is_untouched(memory, num_ranks));
  }
}

TEST_P(SymmetricTest, TheOtherOperationsReadPeersInPlace) {
  const int num_ranks = GetParam();
  const auto ranks = static_cast<size_t>(num_ranks);
  const TestMemory memory(num_ranks, kBytesPerRank);
  const Inputs inputs = random_inputs(ranks, ranks * 40000, DType::kFloat32, 23);
  const std::vector<std::byte> total = reference_reduction(inputs, kFloatSum);
  const size_t share = total.size() / ranks;
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory.arena);
    rank.engine().register_symmetric({kSegment, memory.segment, kBytesPerRank});
    const auto me = static_cast<size_t>(context.rank.value);

    Bytes data = place(memory, context.rank, 64, of(inputs, context.rank));
    const Bytes own = data.subspan(me * share, share);
    rank.reduce_scatter(data, own, kFloatSum).value_or_throw();
    require(equal_bytes(own, ConstBytes(total).subspan(me * share, share)),
            "reduce_scatter in place");

    rank.all_gather(own, data).value_or_throw();
    require(equal_bytes(data, total), "all_gather in place");

    for (int root = 0; root < num_ranks; ++root) {
      data = place(memory, context.rank, 64, of(inputs, context.rank));
      rank.broadcast(data, root).value_or_throw();
      require(equal_bytes(data, of(inputs, root)), format("broadcast from {}", root));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(staging_is_untouched(memory, num_ranks));
}

// One rank passes private memory: all must take the staged way, with the same bits.
TEST_P(SymmetricTest, OnePrivateBufferSendsAllThroughTheStaging) {
  const int num_ranks = GetParam();
  const TestMemory memory(num_ranks, kBytesPerRank);
  const Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), 70001, DType::kFloat32, 29);
  const std::vector<std::byte> expected = reference_reduction(inputs, kFloatSum);
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory.arena);
    rank.engine().register_symmetric({kSegment, memory.segment, kBytesPerRank});
    std::vector<std::byte> own = of(inputs, context.rank);
    const Bytes data = context.rank == 1 ? Bytes(own) : place(memory, context.rank, 0, own);
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    require(equal_bytes(data, expected), "the sum");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_FALSE(staging_is_untouched(memory, num_ranks));
}

TEST_P(SymmetricTest, AnUnregisteredSegmentIsPrivateMemory) {
  const int num_ranks = GetParam();
  const TestMemory memory(num_ranks, kBytesPerRank);
  const Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), 70001, DType::kFloat32, 31);
  const std::vector<std::byte> expected = reference_reduction(inputs, kFloatSum);
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory.arena);
    rank.engine().register_symmetric({kSegment, memory.segment, kBytesPerRank});
    rank.engine().unregister_symmetric(kSegment);
    const Bytes data = place(memory, context.rank, 0, of(inputs, context.rank));
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    require(equal_bytes(data, expected), "the sum");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_FALSE(staging_is_untouched(memory, num_ranks));
}

INSTANTIATE_TEST_SUITE_P(Ranks, SymmetricTest, ::testing::Values(2, 3, 5),
                         ::testing::PrintToStringParamName());

TEST(SymmetricProcessTest, ProcessesReadEachOthersBuffers) {
  constexpr int kNumRanks = 3;
  const TestMemory memory(kNumRanks, kBytesPerRank);
  const Inputs inputs = random_inputs(kNumRanks, 500001, DType::kBfloat16, 37);
  const ReduceKind kind{DType::kBfloat16, ReduceOp::kAvg};
  const std::vector<std::byte> expected = reference_reduction(inputs, kind);
  const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory.arena);
    rank.engine().register_symmetric({kSegment, memory.segment, kBytesPerRank});
    for (int i = 0; i < 5; ++i) {
      const Bytes data = place(memory, context.rank, 0, of(inputs, context.rank));
      rank.all_reduce(data, data, kind).value_or_throw();
      require(equal_bytes(data, expected), "the average");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(staging_is_untouched(memory, kNumRanks));
}

TEST(SymmetricSegmentsTest, FindsOnlyWholeBuffersInTheRanksOwnSlice) {
  const auto memory = make_segment(3 * 4096);
  host::SymmetricSegments segments(3);
  segments.add({7, memory, 4096});
  const Bytes all = memory->bytes();
  const host::SymmetricPlace place = segments.find(all.subspan(4096 + 100, 50), 1);
  EXPECT_EQ(place.segment, 7u);
  EXPECT_EQ(place.offset, 100u);
  EXPECT_EQ(segments.find(all.subspan(4096, 4096), 1).segment, 7u);
  EXPECT_EQ(segments.find(all.subspan(4096, 4097), 1).segment, 0u);
  EXPECT_EQ(segments.find(all.subspan(4095, 10), 1).segment, 0u);
  EXPECT_EQ(segments.find(all.subspan(0, 10), 1).segment, 0u);
  std::vector<std::byte> elsewhere(10);
  EXPECT_EQ(segments.find(elsewhere, 1).segment, 0u);
}

TEST(SymmetricSegmentsTest, RefusesASegmentThatIsTooSmallOrTaken) {
  const auto memory = make_segment(2 * 4096);
  host::SymmetricSegments segments(2);
  EXPECT_THROW(segments.add({1, memory, 4097}), Error);
  EXPECT_THROW(segments.add({0, memory, 4096}), Error);
  EXPECT_THROW(segments.add({1, nullptr, 4096}), Error);
  segments.add({1, memory, 4096});
  EXPECT_THROW(segments.add({1, memory, 4096}), Error);
}

TEST(SymmetricSegmentsTest, KeepsTheMappingUntilItIsRemoved) {
  auto memory = make_segment(4096);
  const std::weak_ptr<os::SharedMemory> watch = memory;
  host::SymmetricSegments segments(1);
  segments.add({1, std::move(memory), 4096});
  EXPECT_FALSE(watch.expired());
  segments.remove(2);
  EXPECT_FALSE(watch.expired());
  segments.remove(1);
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace cadre
