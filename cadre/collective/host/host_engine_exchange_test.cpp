// gather, scatter and all_to_all of the host engine against formulas: private and symmetric memory,
// on threads, on processes and in the simulator; and what ranks learn when they disagree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cadre/base/format.h"
#include "cadre/collective/exchange_reference_test.h"
#include "cadre/collective/host/arena.h"
#include "cadre/collective/host/host_engine_test_ranks.h"
#include "cadre/testing/equal_bytes.h"
#include "cadre/testing/reference_reduction.h"
#include "cadre/testing/simulator_ranks.h"

namespace cadre {
namespace {

using testing::equal_bytes;
using testing::RankContext;
using testing::require;
using testing::run_ranks_as_processes;
using testing::run_ranks_as_threads;
using testing::run_ranks_in_simulator;

constexpr uint32_t kSegment = 3;
constexpr size_t kBytesPerRank = 16 << 20;

// Where a rank's buffers lie: in vectors, or in its slice of a symmetric segment.
class Place {
 public:
  Place() = default;
  Place(const std::shared_ptr<os::SharedMemory>& segment, Rank rank)
      : free_(segment->bytes().subspan(static_cast<size_t>(rank.value) * kBytesPerRank,
                                       kBytesPerRank)) {}

  Bytes make(const std::vector<std::byte>& content) {
    if (free_.empty()) return kept_.emplace_back(content);
    const Bytes bytes = free_.first(content.size());
    free_ = free_.subspan(content.size() + 64);
    if (!content.empty()) std::memcpy(bytes.data(), content.data(), content.size());
    return bytes;
  }
  Bytes make(size_t size) { return make(std::vector<std::byte>(size)); }

 private:
  Bytes free_;
  std::vector<std::vector<std::byte>> kept_;
};

// Each input is overwritten at once after the return, which shows in the others' results if they
// still read it.
void spoil(Bytes bytes) {
  std::ranges::fill(bytes, std::byte{0xee});
}

void check_gather(TestRank& rank, const RankContext& context, Place place, size_t size, int root) {
  const bool is_root = context.rank == root;
  const auto expected = gathered(context.world_size, root, size);
  const Bytes in = place.make(part_between(context.rank, root, size));
  const Bytes out = place.make(is_root ? expected.size() : 0);
  rank.gather(in, out, root).value_or_throw();
  spoil(in);
  require(!is_root || equal_bytes(out, expected), format("gather of {} to {}", size, root));
  // In place: the root's input is its slice of the output.
  const Bytes all = place.make(expected.size());
  const Bytes own = all.subspan(size * static_cast<size_t>(context.rank.value), size);
  std::ranges::copy(part_between(context.rank, root, size), own.begin());
  rank.gather(own, is_root ? all : Bytes(), root).value_or_throw();
  require(!is_root || equal_bytes(all, expected), format("gather in place of {}", size));
}

void check_scatter(TestRank& rank, const RankContext& context, Place place, size_t size, int root) {
  const bool is_root = context.rank == root;
  const auto whole = to_be_scattered(context.world_size, root, size);
  const auto expected = part_between(root, context.rank, size);
  const Bytes in = is_root ? place.make(whole) : Bytes();
  const Bytes out = place.make(size);
  rank.scatter(in, out, root).value_or_throw();
  spoil(in);
  require(equal_bytes(out, expected), format("scatter of {} from {}", size, root));
  const Bytes all = place.make(whole);
  const Bytes own = all.subspan(size * static_cast<size_t>(context.rank.value), size);
  if (!is_root) spoil(all);
  rank.scatter(is_root ? all : Bytes(), own, root).value_or_throw();
  require(equal_bytes(own, expected), format("scatter in place of {}", size));
}

void check_all_to_all(TestRank& rank, const RankContext& context, Place place, size_t part) {
  const SizeMatrix sizes = even_sizes(context.world_size, part);
  const Bytes in = place.make(exchange_input(sizes, context.rank));
  const Bytes out = place.make(in.size());
  rank.all_to_all(in, out).value_or_throw();
  spoil(in);
  require(equal_bytes(out, exchange_output(sizes, context.rank)),
          format("all_to_all of parts of {}", part));
}

void check_all_to_all_v(TestRank& rank, const RankContext& context, Place place,
                        const SizeMatrix& sizes) {
  const auto expected = exchange_output(sizes, context.rank);
  const auto received = received_sizes(sizes, context.rank);
  const auto me = static_cast<size_t>(context.rank.value);
  const Bytes in = place.make(exchange_input(sizes, context.rank));
  const Bytes out = place.make(expected.size());
  rank.all_to_all_v(in, out, {sizes[me], received}).value_or_throw();
  spoil(in);
  require(equal_bytes(out, expected), format("all_to_all_v, {} bytes to rank {}", out.size(), me));
}

// None, inline, flat, staged, and several chunks; sizes of a rank's part.
constexpr size_t kSizes[] = {0, 1, 13, 96, 9001, 40000, 600001};

void check_all(TestRank& rank, const RankContext& context, const Place& place) {
  for (const size_t size : kSizes) {
    const bool is_large = size > 100000;
    for (int root = is_large ? context.world_size - 1 : 0; root < context.world_size; ++root) {
      check_gather(rank, context, place, size, root);
      check_scatter(rank, context, place, size, root);
    }
    check_all_to_all(rank, context, place, size);
    check_all_to_all_v(rank, context, place, random_sizes(context.world_size, size + 1, size));
  }
}

class ExchangeTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeTest, ::testing::Values(1, 2, 3, 4, 7),
                         ::testing::PrintToStringParamName());

TEST_P(ExchangeTest, DataArrivesWhereTheFormulaSays) {
  const auto arena = make_segment(HostEngine::arena_bytes(GetParam()));
  const auto result = run_ranks_as_threads(GetParam(), [&](RankContext& context) {
    TestRank rank(context, arena);
    check_all(rank, context, Place());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

bool staging_is_untouched(const std::shared_ptr<os::SharedMemory>& memory, int num_ranks) {
  const host::Arena arena(memory->bytes(), num_ranks);
  const std::vector<std::byte> zeros(host::kChunkBytes);
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < host::kNumChunks; ++i) {
      if (!equal_bytes({arena.chunk(rank, i), host::kChunkBytes}, zeros)) return false;
    }
  }
  return true;
}

// The reduce is in place, because its output counts only in the segment of the inputs.
TEST_P(ExchangeTest, SymmetricBuffersAreReadInPlace) {
  const int num_ranks = GetParam();
  const auto arena = make_segment(HostEngine::arena_bytes(num_ranks));
  const auto segment = make_segment(static_cast<size_t>(num_ranks) * kBytesPerRank);
  const auto inputs =
      testing::random_inputs(static_cast<size_t>(num_ranks), 70001, DType::kFloat32, 11);
  const auto total = testing::reference_reduction(inputs, kFloatSum);
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, arena);
    rank.engine().register_symmetric({kSegment, segment, kBytesPerRank});
    const Place place(segment, context.rank);
    for (const size_t size : {size_t{40000}, size_t{600001}}) {
      const int root = context.world_size - 1;
      check_gather(rank, context, place, size, root);
      check_scatter(rank, context, place, size, root);
      check_all_to_all(rank, context, place, size);
      check_all_to_all_v(rank, context, place, even_sizes(num_ranks, size));
    }
    for (int root = 0; root < num_ranks; ++root) {
      Place fresh = place;
      const auto& own = inputs[static_cast<size_t>(context.rank.value)];
      const Bytes data = fresh.make(own);
      rank.reduce(data, context.rank == root ? data : Bytes(), kFloatSum, root).value_or_throw();
      require(equal_bytes(data, context.rank == root ? total : own), "reduce in place");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(staging_is_untouched(arena, num_ranks));
}

// One rank alone has private memory: all go through the staging, to the same results.
TEST(ExchangeSymmetricTest, OnePrivateBufferIsEnoughForTheStagedWay) {
  constexpr int kNumRanks = 3;
  const auto arena = make_segment(HostEngine::arena_bytes(kNumRanks));
  const auto segment = make_segment(kNumRanks * kBytesPerRank);
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, arena);
    rank.engine().register_symmetric({kSegment, segment, kBytesPerRank});
    const Place place = context.rank == 1 ? Place() : Place(segment, context.rank);
    check_gather(rank, context, place, 50000, 0);
    check_scatter(rank, context, place, 50000, 0);
    check_all_to_all(rank, context, place, 50000);
    check_all_to_all_v(rank, context, place, random_sizes(kNumRanks, 90000, 5));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_FALSE(staging_is_untouched(arena, kNumRanks));
}

TEST(ExchangeProcessTest, ProcessesReachTheSameResults) {
  constexpr int kNumRanks = 3;
  const auto arena = make_segment(HostEngine::arena_bytes(kNumRanks));
  const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, arena);
    check_all(rank, context, Place());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Operations of changing kinds and sizes with nothing in between, in many orders of events; with
// naps far beyond the deadline, a lost wake-up becomes a time-out.
TEST(ExchangeSimulatorTest, EveryOrderOfEventsEndsRight) {
  constexpr int kNumRanks = 3;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const auto arena = make_segment(HostEngine::arena_bytes(kNumRanks));
    const sim::SimOptions options{.max_nap = std::chrono::hours(1)};
    const auto result = run_ranks_in_simulator(seed, options, kNumRanks, [&](RankContext& context) {
      TestRank rank(context, arena);
      Random random(seed);  // all ranks draw the same
      for (int i = 0; i < 12; ++i) {
        const size_t size = kSizes[random.below(6)];
        const int root = static_cast<int>(random.below(kNumRanks));
        const uint64_t kind = random.below(4);
        if (kind == 0) check_gather(rank, context, {}, size, root);
        if (kind == 1) check_scatter(rank, context, {}, size, root);
        if (kind == 2) check_all_to_all(rank, context, {}, size);
        if (kind == 3) {
          check_all_to_all_v(rank, context, {}, random_sizes(kNumRanks, size + 1, random.next()));
        }
      }
    });
    ASSERT_TRUE(result.ok()) << "seed " << seed << "\n" << result.failures();
  }
}

TEST(ExchangeMismatchTest, APartThatIsNotExpectedIsNamedOnAllRanksBeforeDataMoves) {
  constexpr int kNumRanks = 4;
  const auto arena = make_segment(HostEngine::arena_bytes(kNumRanks));
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, arena);
    const SizeMatrix sizes = even_sizes(kNumRanks, 1000);
    auto received = received_sizes(sizes, context.rank);
    if (context.rank == 2) received[1] = 996;
    const auto in = exchange_input(sizes, context.rank);
    std::vector<std::byte> out(context.rank == 2 ? 3996 : 4000);
    const Status status =
        rank.all_to_all_v(in, out, {sizes[static_cast<size_t>(context.rank.value)], received});
    require(!status.ok() && status.error().code() == ErrorCode::kInvalidArgument, "no mismatch");
    const auto& parts = rank.progress().part_mismatch;
    require(parts.sender == 1 && parts.receiver == 2, "the wrong ranks");
    require(parts.sent_bytes == 1000 && parts.expected_bytes == 996, "the wrong sizes");
    require(status.error().message() ==
                "all_to_all_v(uint8) #1: rank 1 sends 1000 bytes to rank 2, which expects 996",
            status.error().message());
    require(std::ranges::all_of(out, [](std::byte b) { return b == std::byte{0}; }), "data moved");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ExchangeMismatchTest, AnotherRootIsAnotherOperation) {
  for (const OpKind kind : {OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
    const auto arena = make_segment(HostEngine::arena_bytes(3));
    const auto result = run_ranks_as_threads(3, [&](RankContext& context) {
      TestRank rank(context, arena);
      const int root = context.rank == 1 ? 1 : 0;
      std::vector<std::byte> small(8);
      std::vector<std::byte> large(24);
      const Status status = kind == OpKind::kReduce   ? rank.reduce(small, small, kFloatSum, root)
                            : kind == OpKind::kGather ? rank.gather(small, large, root)
                                                      : rank.scatter(large, small, root);
      require(!status.ok() && status.error().code() == ErrorCode::kInvalidArgument, "no mismatch");
      const auto theirs = OpDescriptor::from_fingerprint(rank.progress().mismatch_fingerprint);
      require(theirs.kind == kind && theirs.root == 1 - root, theirs.to_string());
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

}  // namespace
}  // namespace cadre
