// Compares gather, scatter and all_to_all of the host engine with formulas, with private and
// symmetric memory, on threads, on processes and in the simulator. Also tests the errors of ranks
// that call different operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/exchange_reference.h"
#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/reference_reduction.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre {
namespace {

using testing::equal_bytes;
using testing::RankContext;
using testing::require;
using testing::run_ranks_as_processes;
using testing::run_ranks_as_threads;
using testing::run_ranks_in_simulator;

constexpr size_t kBytesPerRank = 16 << 20;

// Allocates a rank's buffers: as vectors, or in the rank's slice of symmetric memory.
class Ground {
 public:
  Ground() = default;
  Ground(const TestMemory& memory, Rank rank) : free_(memory.slice(rank)) {}

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

// Overwrites an input as soon as the call has returned. If other ranks still read it, their results
// are wrong.
void spoil(Bytes bytes) {
  std::ranges::fill(bytes, std::byte{0xee});
}

void check_gather(TestRank& rank, const RankContext& context, Ground place, size_t size, int root) {
  const bool is_root = context.rank == root;
  const auto expected = gathered(context.world_size, root, size);
  const Bytes in = place.make(part_between(context.rank, root, size));
  const Bytes out = place.make(is_root ? expected.size() : 0);
  rank.gather(in, out, root).value_or_throw();
  spoil(in);
  require(!is_root || equal_bytes(out, expected), format("gather of {} to {}", size, root));
  // The root's input is its slice of the output.
  const Bytes all = place.make(expected.size());
  const Bytes own = all.subspan(size * static_cast<size_t>(context.rank.value), size);
  std::ranges::copy(part_between(context.rank, root, size), own.begin());
  rank.gather(own, is_root ? all : Bytes(), root).value_or_throw();
  require(!is_root || equal_bytes(all, expected), format("gather in place of {}", size));
}

void check_scatter(TestRank& rank, const RankContext& context, Ground place, size_t size,
                   int root) {
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

void check_all_to_all(TestRank& rank, const RankContext& context, Ground place, size_t part) {
  const SizeMatrix sizes = even_sizes(context.world_size, part);
  const Bytes in = place.make(exchange_input(sizes, context.rank));
  const Bytes out = place.make(in.size());
  rank.all_to_all(in, out).value_or_throw();
  spoil(in);
  require(equal_bytes(out, exchange_output(sizes, context.rank)),
          format("all_to_all of parts of {}", part));
}

void check_all_to_all_v(TestRank& rank, const RankContext& context, Ground place,
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

// Sizes of a rank's part that use each way to move data: none, inline, flat, staged in one chunk,
// and staged in several chunks.
constexpr size_t kSizes[] = {0, 1, 13, 96, 9001, 40000, 600001};

void check_all(TestRank& rank, const RankContext& context, const Ground& place) {
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
  TestMemory memory(GetParam());
  const auto result = run_ranks_as_threads(GetParam(), [&](RankContext& context) {
    TestRank rank(context, memory);
    check_all(rank, context, Ground());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(ExchangeTest, SymmetricBuffersAreReadInPlace) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks, {.slice_bytes = kBytesPerRank});
  const auto inputs =
      testing::random_inputs(static_cast<size_t>(num_ranks), 70001, DType::kFloat32, 11);
  const auto total = testing::reference_reduction(inputs, kFloatSum);
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    const Ground place(memory, context.rank);
    for (const size_t size : {size_t{40000}, size_t{600001}}) {
      const int root = context.world_size - 1;
      check_gather(rank, context, place, size, root);
      check_scatter(rank, context, place, size, root);
      check_all_to_all(rank, context, place, size);
      check_all_to_all_v(rank, context, place, even_sizes(num_ranks, size));
    }
    for (int root = 0; root < num_ranks; ++root) {
      Ground fresh = place;
      const auto& own = inputs[static_cast<size_t>(context.rank.value)];
      const Bytes data = fresh.make(own);
      rank.reduce(data, context.rank == root ? data : Bytes(), kFloatSum, root).value_or_throw();
      require(equal_bytes(data, context.rank == root ? total : own), "reduce in place");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_TRUE(memory.is_staging_untouched());
}

// Only one rank has private memory. All ranks must then use the staging memory, and get the same
// results as with symmetric memory.
TEST(ExchangeSymmetricTest, OnePrivateBufferIsEnoughForTheStagedWay) {
  constexpr int kNumRanks = 3;
  TestMemory memory(kNumRanks, {.slice_bytes = kBytesPerRank});
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    const Ground place = context.rank == 1 ? Ground() : Ground(memory, context.rank);
    check_gather(rank, context, place, 50000, 0);
    check_scatter(rank, context, place, 50000, 0);
    check_all_to_all(rank, context, place, 50000);
    check_all_to_all_v(rank, context, place, random_sizes(kNumRanks, 90000, 5));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_FALSE(memory.is_staging_untouched());
}

TEST(ExchangeProcessTest, ProcessesReachTheSameResults) {
  constexpr int kNumRanks = 3;
  TestMemory memory(kNumRanks);
  const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    check_all(rank, context, Ground());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Operations of different kinds and sizes follow each other directly, in many orders of events. The
// simulated naps are longer than the deadline, so a lost wake-up causes a timeout.
TEST(ExchangeSimulatorTest, EveryOrderOfEventsEndsRight) {
  constexpr int kNumRanks = 3;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    TestMemory memory(kNumRanks);
    const sim::SimOptions options{.max_nap = std::chrono::hours(1)};
    const auto result = run_ranks_in_simulator(seed, options, kNumRanks, [&](RankContext& context) {
      TestRank rank(context, memory);
      Random random(seed);  // all ranks draw the same numbers
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
  TestMemory memory(kNumRanks);
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
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
    TestMemory memory(3);
    const auto result = run_ranks_as_threads(3, [&](RankContext& context) {
      TestRank rank(context, memory);
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
