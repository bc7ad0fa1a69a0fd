// Compares every operation of the host engine with formulas, on threads and on processes.
#include "cadre/core/collective/host/host_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/collective/reduction_table.h"
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

Inputs random_bytes(int num_ranks, size_t num_bytes, uint64_t seed) {
  return random_inputs(static_cast<size_t>(num_ranks), num_bytes, DType::kUint8, seed);
}

std::vector<std::byte> concatenate(const Inputs& inputs) {
  std::vector<std::byte> all;
  for (const auto& input : inputs) all.insert(all.end(), input.begin(), input.end());
  return all;
}

std::vector<std::byte> slice_of(const std::vector<std::byte>& all, Rank rank, int world_size) {
  const size_t share = all.size() / static_cast<size_t>(world_size);
  const auto begin = all.begin() + static_cast<ptrdiff_t>(share) * rank.value;
  return {begin, begin + static_cast<ptrdiff_t>(share)};
}

// Runs an all_reduce on one rank and checks the result. The rank overwrites its input as soon as
// the call has returned. If other ranks still read it, their results are wrong.
void check_all_reduce(TestRank& rank, Rank me, const Inputs& inputs,
                      const std::vector<std::byte>& expected, ReduceKind kind) {
  std::vector<std::byte> in = of(inputs, me);
  std::vector<std::byte> out(in.size());
  rank.all_reduce(in, out, kind).value_or_throw();
  std::fill(in.begin(), in.end(), std::byte{0xee});
  require(equal_bytes(out, expected),
          format("all_reduce, {} of {} x {} bytes", kind.op, kind.dtype, in.size()));
  in = of(inputs, me);
  rank.all_reduce(in, in, kind).value_or_throw();
  require(equal_bytes(in, expected), format("all_reduce in place, {} of {}", kind.op, kind.dtype));
}

void check_reduce_scatter(TestRank& rank, RankContext& context, const Inputs& inputs,
                          const std::vector<std::byte>& total, ReduceKind kind) {
  const std::vector<std::byte> expected = slice_of(total, context.rank, context.world_size);
  std::vector<std::byte> in = of(inputs, context.rank);
  std::vector<std::byte> out(expected.size());
  rank.reduce_scatter(in, out, kind).value_or_throw();
  std::fill(in.begin(), in.end(), std::byte{0xee});
  require(equal_bytes(out, expected), format("reduce_scatter, {} of {}", kind.op, kind.dtype));
  in = of(inputs, context.rank);
  const Bytes own =
      Bytes(in).subspan(expected.size() * static_cast<size_t>(context.rank.value), expected.size());
  rank.reduce_scatter(in, own, kind).value_or_throw();
  require(equal_bytes(own, expected), "reduce_scatter in place");
}

// Reduces to every rank. Large data is reduced to the last rank only.
void check_reduces(TestRank& rank, RankContext& context, const Inputs& inputs,
                   const std::vector<std::byte>& total, ReduceKind kind) {
  const bool is_large = total.size() > 1000000;
  for (int root = is_large ? context.world_size - 1 : 0; root < context.world_size; ++root) {
    const bool is_root = context.rank == root;
    std::vector<std::byte> in = of(inputs, context.rank);
    std::vector<std::byte> out(is_root ? in.size() : 0);
    rank.reduce(in, out, kind, root).value_or_throw();
    require(equal_bytes(in, of(inputs, context.rank)), "reduce changed its input");
    std::fill(in.begin(), in.end(), std::byte{0xee});
    require(!is_root || equal_bytes(out, total),
            format("reduce, {} of {} x {} bytes to {}", kind.op, kind.dtype, in.size(), root));
    in = of(inputs, context.rank);
    rank.reduce(in, is_root ? Bytes(in) : Bytes(), kind, root).value_or_throw();
    require(equal_bytes(in, is_root ? total : of(inputs, context.rank)),
            format("reduce in place, {} of {}", kind.op, kind.dtype));
  }
}

void check_all_gather(TestRank& rank, RankContext& context, const Inputs& inputs,
                      const std::vector<std::byte>& expected) {
  std::vector<std::byte> in = of(inputs, context.rank);
  std::vector<std::byte> out(expected.size());
  rank.all_gather(in, out).value_or_throw();
  std::fill(in.begin(), in.end(), std::byte{0xee});
  require(equal_bytes(out, expected), format("all_gather of {} bytes", in.size()));
  std::fill(out.begin(), out.end(), std::byte{0});
  const Bytes own =
      Bytes(out).subspan(in.size() * static_cast<size_t>(context.rank.value), in.size());
  if (!own.empty()) std::memcpy(own.data(), of(inputs, context.rank).data(), own.size());
  rank.all_gather(own, out).value_or_throw();
  require(equal_bytes(out, expected), format("all_gather in place of {} bytes", in.size()));
}

// Broadcasts from every rank. Large data is broadcast from the last rank only.
void check_broadcasts(TestRank& rank, RankContext& context, const Inputs& inputs) {
  const bool is_large = inputs[0].size() > 1000000;
  for (int root = is_large ? context.world_size - 1 : 0; root < context.world_size; ++root) {
    std::vector<std::byte> data = of(inputs, context.rank);
    rank.broadcast(data, root).value_or_throw();
    require(equal_bytes(data, of(inputs, root)),
            format("broadcast of {} bytes from {}", data.size(), root));
  }
}

// A reduction and a size, with the inputs and the expected result, which are computed before the
// ranks start.
struct ReductionCase {
  ReduceKind kind;
  Inputs inputs;
  std::vector<std::byte> expected;
};

std::vector<ReductionCase> reduction_cases(int num_ranks, const std::vector<ReduceKind>& kinds,
                                           const std::vector<size_t>& counts) {
  std::vector<ReductionCase> cases;
  for (ReduceKind kind : kinds) {
    for (size_t count : counts) {
      // The count is a multiple of the number of ranks, so that reduce_scatter can use the same
      // inputs.
      const auto ranks = static_cast<size_t>(num_ranks);
      Inputs inputs = random_inputs(ranks, (count + ranks - 1) / ranks * ranks, kind.dtype, count);
      std::vector<std::byte> expected = reference_reduction(inputs, kind);
      cases.push_back({kind, std::move(inputs), std::move(expected)});
    }
  }
  return cases;
}

void run_reduction_cases(TestRank& rank, RankContext& context,
                         const std::vector<ReductionCase>& cases) {
  for (const ReductionCase& c : cases) {
    check_all_reduce(rank, context.rank, c.inputs, c.expected, c.kind);
    check_reduce_scatter(rank, context, c.inputs, c.expected, c.kind);
    check_reduces(rank, context, c.inputs, c.expected, c.kind);
  }
}

class HostEngineTest : public ::testing::TestWithParam<int> {};

TEST_P(HostEngineTest, EveryReductionEqualsTheFormulaBitForBit) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks);
  const auto cases =
      reduction_cases(num_ranks, testing::reduce_kinds_in(num_ranks), {0, 1, 13, 27, 1000, 9001});
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    run_reduction_cases(rank, context, cases);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(HostEngineTest, LargeReductionsPassThroughManyChunks) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks);
  auto cases = reduction_cases(num_ranks, {kFloatSum}, {131072, 700001});
  for (auto& c : reduction_cases(num_ranks, {{DType::kBfloat16, ReduceOp::kAvg}}, {300001})) {
    cases.push_back(std::move(c));
  }
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    run_reduction_cases(rank, context, cases);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(HostEngineTest, DataIsMovedWhole) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks);
  std::vector<Inputs> sizes;
  for (size_t size : {0, 1, 96, 97, 32768, 32769, 2700001}) {
    sizes.push_back(random_bytes(num_ranks, size, size));
  }
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    for (const Inputs& inputs : sizes) {
      check_all_gather(rank, context, inputs, concatenate(inputs));
      check_broadcasts(rank, context, inputs);
      rank.barrier().value_or_throw();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Operations of different sizes follow each other directly. If a rank reuses a slot, an entry or a
// chunk too early, a result is wrong.
TEST_P(HostEngineTest, AnyOrderOfSizesIsSafe) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks);
  constexpr uint64_t kSeed = 20261121;
  const auto cases = reduction_cases(num_ranks, {kFloatSum}, {1, 20, 300, 7000, 40000, 700000});
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    Random random(kSeed);  // all ranks draw the same numbers
    for (int i = 0; i < 150; ++i) {
      const ReductionCase& c = cases[random.below(cases.size() - (i % 10 == 0 ? 0 : 1))];
      switch (random.below(5)) {
        case 0:
          check_all_reduce(rank, context.rank, c.inputs, c.expected, c.kind);
          break;
        case 1:
          check_reduce_scatter(rank, context, c.inputs, c.expected, c.kind);
          break;
        case 2:
          check_reduces(rank, context, c.inputs, c.expected, c.kind);
          break;
        case 3:
          check_all_gather(rank, context, c.inputs, concatenate(c.inputs));
          break;
        default:
          check_broadcasts(rank, context, c.inputs);
          break;
      }
    }
  });
  EXPECT_TRUE(result.ok()) << "seed " << kSeed << "\n" << result.failures();
}

TEST_P(HostEngineTest, BarrierIsPassedByNobodyBeforeAllHaveCome) {
  const int num_ranks = GetParam();
  TestMemory memory(num_ranks);
  std::atomic<int> arrived{0};
  const auto result = run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    TestRank rank(context, memory);
    for (int round = 1; round <= 200; ++round) {
      arrived.fetch_add(1, std::memory_order_relaxed);
      rank.barrier().value_or_throw();
      require(arrived.load(std::memory_order_relaxed) >= round * num_ranks,
              "a rank left the barrier before all had entered it");
      rank.barrier().value_or_throw();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostEngineTest, ::testing::Values(1, 2, 3, 4, 7, 9),
                         ::testing::PrintToStringParamName());

TEST(HostEngineProcessTest, ProcessesReachTheSameResults) {
  constexpr int kNumRanks = 3;
  TestMemory memory(kNumRanks);
  const auto cases = reduction_cases(kNumRanks, {kFloatSum, {DType::kInt64, ReduceOp::kMax}},
                                     {1, 1000, 50000, 600000});
  const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
    TestRank rank(context, memory);
    run_reduction_cases(rank, context, cases);
    for (const ReductionCase& c : cases) {
      check_all_gather(rank, context, c.inputs, concatenate(c.inputs));
      check_broadcasts(rank, context, c.inputs);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineProcessTest, TwoRunsGiveTheSameBitsOnAllRanks) {
  constexpr int kNumRanks = 4;
  const Inputs inputs = random_inputs(kNumRanks, 100000, DType::kFloat32, 5);
  std::vector<std::string> results;
  for (int run = 0; run < 2; ++run) {
    TestMemory memory(kNumRanks);
    const auto result = run_ranks_as_processes(kNumRanks, [&](RankContext& context) {
      TestRank rank(context, memory);
      std::vector<std::byte> data = of(inputs, context.rank);
      rank.all_reduce(data, data, kFloatSum).value_or_throw();
      context.output.assign(reinterpret_cast<const char*>(data.data()), data.size());
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) results.push_back(rank.output);
  }
  for (const std::string& output : results) EXPECT_EQ(output, results[0]);
}

}  // namespace
}  // namespace cadre
