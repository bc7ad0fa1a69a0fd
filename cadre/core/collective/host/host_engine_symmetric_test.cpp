// Tests that operations on symmetric memory give the same bits as on private memory, and do not
// copy through the staging memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/host/arena.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/reference_reduction.h"

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

constexpr size_t kBytesPerRank = 8 << 20;

// Writes data into this rank's slice, at `offset` bytes.
Bytes place(const TestMemory& memory, Rank rank, size_t offset,
            const std::vector<std::byte>& data) {
  const Bytes target = memory.slice(rank).subspan(offset, data.size());
  std::memcpy(target.data(), data.data(), data.size());
  return target;
}

class SymmetricTest : public ::testing::TestWithParam<int> {};

TEST_P(SymmetricTest, AllReduceEqualsTheFormulaWithoutStaging) {
  const int num_ranks = GetParam();
  for (ReduceKind kind : testing::all_reduce_kinds()) {
    TestMemory memory(num_ranks, {.slice_bytes = kBytesPerRank});
    const Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), 70001, kind.dtype, 17);
    const std::vector<std::byte> expected = reference_reduction(inputs, kind);
    const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
      TestRank rank(context, memory);
      // The offsets of the buffers differ between ranks.
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
    EXPECT_TRUE(memory.is_staging_untouched());
  }
}

// Rank 0 has reported rank 1 as lost and may reuse its own memory. Rank 1, which is still alive,
// must get an error and must not write to that memory.
TEST(SymmetricLostRankTest, DoesNotWriteToMemoryThatItsPeersMayReuse) {
  constexpr size_t kNumBytes = 1 << 16;
  constexpr std::byte kUntouched{0x77};
  TestMemory memory(2, {.slice_bytes = kBytesPerRank});
  memory.of(0).forget_holder(1);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    TestRank rank(context, memory);
    const Bytes in = memory.slice(context.rank).first(kNumBytes);
    const Bytes out = memory.slice(context.rank).subspan(kNumBytes, kNumBytes);
    std::ranges::fill(out, kUntouched);
    const Status status = rank.all_reduce(in, out, kFloatSum);
    if (context.rank == 0) return;  // rank 0 may have returned before rank 1 writes
    require(!status.ok() && status.error().code() == ErrorCode::kAborted, "rank 1 is lost");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  // Rank 1 would have reduced this second half if it had not been reported as lost.
  EXPECT_EQ(memory.slice(0)[2 * kNumBytes - 1], kUntouched);
}

TEST_P(SymmetricTest, TheOtherOperationsReadPeersInPlace) {
  const int num_ranks = GetParam();
  const auto ranks = static_cast<size_t>(num_ranks);
  TestMemory memory(num_ranks, {.slice_bytes = kBytesPerRank});
  const Inputs inputs = random_inputs(ranks, ranks * 40000, DType::kFloat32, 23);
  const std::vector<std::byte> total = reference_reduction(inputs, kFloatSum);
  const size_t share = total.size() / ranks;
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
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
  EXPECT_TRUE(memory.is_staging_untouched());
}

// One rank passes private memory. All ranks must then use the staging memory, and get the same
// bits.
TEST_P(SymmetricTest, OnePrivateBufferSendsAllThroughTheStaging) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks, {.slice_bytes = kBytesPerRank});
  const Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), 70001, DType::kFloat32, 29);
  const std::vector<std::byte> expected = reference_reduction(inputs, kFloatSum);
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> own = of(inputs, context.rank);
    const Bytes data = context.rank == 1 ? Bytes(own) : place(memory, context.rank, 0, own);
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    require(equal_bytes(data, expected), "the sum");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_FALSE(memory.is_staging_untouched());
}

INSTANTIATE_TEST_SUITE_P(Ranks, SymmetricTest, ::testing::Values(2, 3, 5),
                         ::testing::PrintToStringParamName());

TEST(SymmetricProcessTest, ProcessesReadEachOthersBuffers) {
  constexpr int kNumRanks = 3;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const Inputs inputs = random_inputs(kNumRanks, 500001, DType::kBfloat16, 37);
  const ReduceKind kind{DType::kBfloat16, ReduceOp::kAvg};
  const std::vector<std::byte> expected = reference_reduction(inputs, kind);
  const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    for (int i = 0; i < 5; ++i) {
      const Bytes data = place(memory, context.rank, 0, of(inputs, context.rank));
      rank.all_reduce(data, data, kind).value_or_throw();
      require(equal_bytes(data, expected), "the average");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(memory.is_staging_untouched());
}

// If only the root has symmetric memory, its peers must still read its buffer in place.
TEST(SymmetricRootTest, ABroadcastAndAScatterNeedTheRootsBufferAlone) {
  constexpr int kNumRanks = 3;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const Inputs inputs = random_inputs(kNumRanks, 90000, DType::kFloat32, 41);
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    const bool is_root = context.rank == 1;
    std::vector<std::byte> own(of(inputs, 1).size());
    const Bytes data = is_root ? place(memory, 1, 64, of(inputs, 1)) : Bytes(own);
    rank.broadcast(data, 1).value_or_throw();
    require(equal_bytes(data, of(inputs, 1)), "broadcast");
    const size_t share = data.size() / kNumRanks;
    std::vector<std::byte> out(share);
    rank.scatter(is_root ? data : Bytes(), out, 1).value_or_throw();
    const auto me = static_cast<size_t>(context.rank.value);
    require(equal_bytes(out, ConstBytes(of(inputs, 1)).subspan(me * share, share)), "scatter");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(memory.is_staging_untouched());
}

// A group of ranks 0 and 2 and a group of all three ranks use the same memory. Each group accesses
// the memory of its members in place, and destroying one group releases no memory that the other
// uses.
TEST(SymmetricGroupsTest, MemoryIsSymmetricInEveryGroupOfTheHost) {
  constexpr int kNumRanks = 3;
  constexpr size_t kBufferBytes = 1 << 20;
  const auto system = os::make_native_system();
  const auto memories =
      testing::make_host_memories(*system, {.num_slots = kNumRanks, .slice_bytes = 16 << 20});
  const std::vector<std::vector<int>> groups = {{0, 1, 2}, {0, 2}};
  std::vector<HostEngineSetup> setups[2];
  for (size_t group = 0; group < 2; ++group) {
    std::vector<Piece> blocks;
    std::vector<Place> places;
    for (const int slot : groups[group]) {
      auto& memory = *memories[static_cast<size_t>(slot)];
      blocks.push_back(HostEngine::cut_block(memory, groups[group]).value_or_throw());
      places.push_back(blocks.back().place());
    }
    for (size_t rank = 0; rank < groups[group].size(); ++rank) {
      const auto slot = static_cast<size_t>(groups[group][rank]);
      setups[group].push_back({memories[slot], static_cast<int>(rank), false, groups[group], places,
                               std::move(blocks[rank])});
    }
  }
  const Inputs inputs = random_inputs(kNumRanks, kBufferBytes / 4, DType::kFloat32, 43);
  const auto total = reference_reduction(inputs, kFloatSum);
  const auto of_two = reference_reduction({total, total}, kFloatSum);
  const ReduceKind minimum{DType::kFloat32, ReduceOp::kMin};
  const auto least = reference_reduction({of_two, total, of_two}, minimum);
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    const auto slot = static_cast<size_t>(context.rank.value);
    TestRank all(context, std::move(setups[0][slot]));
    const Piece piece = memories[slot]->allocate({.num_bytes = kBufferBytes}).value_or_throw();
    std::ranges::copy(of(inputs, context.rank), piece.bytes().begin());
    all.all_reduce(piece.bytes(), piece.bytes(), kFloatSum).value_or_throw();
    require(equal_bytes(piece.bytes(), total), "in the group of all");
    if (slot != 1) {
      RankContext pair{context.system, slot == 0 ? 0 : 1, 2, {}, {}};
      TestRank two(pair, std::move(setups[1][slot == 0 ? 0 : 1]));
      two.all_reduce(piece.bytes(), piece.bytes(), kFloatSum).value_or_throw();
      require(equal_bytes(piece.bytes(), of_two), "in the group of two");
      two.barrier().value_or_throw();
    }
    all.all_reduce(piece.bytes(), piece.bytes(), minimum).value_or_throw();
    require(equal_bytes(piece.bytes(), least), "in the group of all, afterwards");
    all.barrier().value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

void require_aborted(const Status& status, std::string_view part) {
  require(!status.ok(), "it succeeded");
  require(status.error().code() == ErrorCode::kAborted, status.error().message());
  require(status.error().message().find(part) != std::string::npos, status.error().message());
}

// Rank 1 has revoked its memory, as it does when another group fails. It must return an error
// before it announces the operation.
TEST(SymmetricGroupsTest, MemoryThatWasTakenBackIsNeitherAnnouncedNorUsed) {
  constexpr int kNumRanks = 2;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    const Bytes data = memory.slice(context.rank).first(1 << 20);
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    rank.barrier().value_or_throw();
    if (context.rank == 1) {
      memory.of(1).revoke(memory.place(1), 4096, "rank 7 timed out").value_or_throw();
      require_aborted(rank.all_reduce(data, data, kFloatSum), "the failure: rank 7 timed out");
    } else {
      rank.skip_number();
    }
    rank.barrier().value_or_throw();  // would fail if rank 1 had announced the operation
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 revokes its memory after it has announced it. Rank 0 must notice that and return an error
// instead of the result.
TEST(SymmetricGroupsTest, NoResultIsGoodThatWasReadFromMemoryTakenBackMeanwhile) {
  constexpr int kNumRanks = 2;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const host::Arena arena = memory.arena();
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    const Bytes data = memory.slice(context.rank).first(1 << 20);
    if (context.rank == 0) {
      require_aborted(rank.all_gather(data.first(data.size() / 2), data),
                      "rank 1 took its memory back after a failure");
      return;
    }
    const os::Interrupt interrupt;
    host::Peers peers(context.system, interrupt, arena,
                      {.rank = 1, .world_size = kNumRanks, .oversubscribed = true});
    OpProgress progress;
    const OpDescriptor descriptor{.kind = OpKind::kAllGather, .count = data.size() / 2};
    const Fingerprint fingerprint = descriptor.fingerprint();
    const OpContext op{.number = 1,
                       .fingerprints = {&fingerprint, 1},
                       .deadline = context.system.deadline_in(kPatience),
                       .progress = progress};
    const host::Announcement places{.in = memory.place(1), .out = memory.place(1)};
    peers.enter(op, std::as_bytes(std::span(&places, 1))).value_or_throw();
    peers.wait_for(0, 1, op).value_or_throw();  // rank 0 has copied the data
    memory.of(1).revoke(memory.place(1), 4096, "another group failed").value_or_throw();
    peers.signal_step(1);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(SymmetricGroupsTest, APlaceOutsideOfItsSliceIsRefused) {
  constexpr int kNumRanks = 2;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const host::Arena arena = memory.arena();
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    const Bytes data = memory.slice(context.rank).first(1 << 20);
    if (context.rank == 0) {
      TestRank rank(context, memory);
      const Status status = rank.broadcast(data, 1);
      require(!status.ok() && status.error().code() == ErrorCode::kCorruption, "it was believed");
      return;
    }
    const os::Interrupt interrupt;
    host::Peers peers(context.system, interrupt, arena,
                      {.rank = 1, .world_size = kNumRanks, .oversubscribed = true});
    OpProgress progress;
    const OpDescriptor descriptor{.kind = OpKind::kBroadcast, .root = 1, .count = data.size()};
    const Fingerprint fingerprint = descriptor.fingerprint();
    const OpContext op{.number = 1,
                       .fingerprints = {&fingerprint, 1},
                       .deadline = context.system.deadline_in(kPatience),
                       .progress = progress};
    host::Announcement places{.in = memory.place(1), .out = memory.place(1)};
    places.in.offset = ~uint64_t{0} - 100;
    peers.enter(op, std::as_bytes(std::span(&places, 1))).value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
