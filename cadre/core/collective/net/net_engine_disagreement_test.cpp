// Tests ranks that call different operations over TCP. Whatever messages a rank has received, it
// must never return OK with a wrong result.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/collective_call.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using testing::CollectiveCall;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

// These crossovers lie between the counts below, so each operation runs both of its algorithms.
constexpr CrossoverTable kEarlyCrossovers = {.all_reduce_ring_bytes = 1000,
                                             .broadcast_chain_bytes = 1000,
                                             .all_gather_ring_bytes = 1000,
                                             .chain_segment_bytes = 4000,
                                             .gather_linear_bytes = 1000};

using Numbers = std::vector<int32_t>;

// Returns element `index` of a rank's input. No element equals the sum of a few other elements.
int32_t number_from(int rank, uint64_t index) {
  return (rank + 1) * 1'000'003 + static_cast<int32_t>(index) * 7919;
}

int32_t sum_at(int world_size, uint64_t index) {
  int32_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += number_from(rank, index);
  return sum;
}

// Returns the result of the call if all ranks make it.
Numbers expected_of(const CollectiveCall& call, Rank rank) {
  Numbers numbers;
  for (const auto& [from, begin, count] : call.output(rank)) {
    for (uint64_t i = begin; i < begin + count; ++i) {
      numbers.push_back(from ? number_from(*from, i) : sum_at(call.world_size, i));
    }
  }
  return numbers;
}

struct Outcome {
  Status status;
  Numbers output;
};

Outcome run_call(EngineRank& engine, const CollectiveCall& call, Rank rank) {
  Numbers in;
  for (uint64_t i = 0; i < call.num_input(rank); ++i) in.push_back(number_from(rank, i));
  Numbers out =
      call.kind == OpKind::kBroadcast && rank == call.root ? in : Numbers(call.num_output(rank));
  Collective collective =
      call.collective(rank, std::as_bytes(std::span(in)), std::as_writable_bytes(std::span(out)));
  const Status status = engine.submit({&collective, 1});
  return {status, out};
}

// calls[r] is the call of rank r. Returns an empty text, or a description of the wrong results.
std::string wrong_results(os::System& system, const std::vector<CollectiveCall>& calls,
                          const CrossoverTable& table) {
  const int world_size = static_cast<int>(calls.size());
  const TransportGroup group(system, TransportKind::kTcp, world_size);
  return group.run([&](Transport& transport) {
    const Rank rank = transport.rank();
    EngineRank engine(system, transport, table);
    engine.barrier().value_or_throw();
    // These tests run without a Monitor, which would report the failed operation to all ranks. So a
    // rank that does not detect the mismatch itself waits until this deadline.
    engine.set_patience(milliseconds(100));
    const CollectiveCall& call = calls[static_cast<size_t>(rank.value)];
    const Outcome outcome = run_call(engine, call, rank);
    if (!outcome.status.ok()) return;
    // No rank may return from a barrier before all ranks have entered it.
    require(call.kind != OpKind::kBarrier, "it left the barrier");
    const Numbers expected = expected_of(call, rank);
    const auto differs = std::ranges::mismatch(outcome.output, expected);
    require(outcome.output == expected,
            format("{} of {} elements returned OK with a wrong element {}", call.kind, call.count,
                   differs.in1 - outcome.output.begin()));
  });
}

CollectiveCall call_of(OpKind kind, int world_size) {
  return {.kind = kind,
          .dtype = DType::kInt32,
          .count = 1,
          .reduction = ReduceOp::kSum,
          .world_size = world_size};
}

// Rank 2 calls a barrier instead. Rank 0 notices the mismatch, and sends a refusal, while rank 1
// waits for its second message of the reduce_scatter. Rank 1 must not take the refusal for payload.
TEST(NetEngineDisagreementTest, ARefusalIsNeverTakenForPayload) {
  const auto system = os::make_native_system();
  const CollectiveCall call = call_of(OpKind::kReduceScatter, 3);
  const CollectiveCall barrier = call_of(OpKind::kBarrier, 3);
  for (int attempt = 0; attempt < 20; ++attempt) {
    ASSERT_EQ(wrong_results(*system, {call, call, barrier}, {}), "") << "attempt " << attempt;
  }
}

CollectiveCall random_call(Random& random, int world_size) {
  constexpr std::array kKinds = {OpKind::kBroadcast,     OpKind::kAllReduce, OpKind::kAllGather,
                                 OpKind::kReduceScatter, OpKind::kReduce,    OpKind::kGather,
                                 OpKind::kScatter,       OpKind::kAllToAll,  OpKind::kBarrier};
  constexpr std::array<uint64_t, 5> kCounts = {1, 3, 100, 5000, 200'000};
  CollectiveCall call = call_of(kKinds[random.below(kKinds.size())], world_size);
  if (call.kind == OpKind::kBarrier) return call;
  call.count = kCounts[random.below(kCounts.size())];
  call.root = static_cast<int>(random.below(static_cast<uint64_t>(world_size)));
  return call;
}

TEST(NetEngineDisagreementTest, NoRankReturnsOkWithAWrongResult) {
  const auto system = os::make_native_system();
  std::vector<uint64_t> seeds(150);
  std::iota(seeds.begin(), seeds.end(), 1);
  for (const uint64_t seed : testing::share_of(seeds)) {
    Random random(seed);
    const int world_size = 2 + static_cast<int>(random.below(4));
    const CollectiveCall one = random_call(random, world_size);
    CollectiveCall other = one;
    while (other.kind == one.kind) other = random_call(random, world_size);
    std::vector<CollectiveCall> calls(static_cast<size_t>(world_size), one);
    const size_t first_odd = random.below(calls.size());
    calls[first_odd] = other;
    for (size_t i = 1; i < calls.size(); ++i) {
      const bool is_odd = i != first_odd && random.below(3) == 0;
      if (is_odd && i != (first_odd + 1) % calls.size()) calls[i] = other;
    }
    const CrossoverTable table = random.below(2) == 0 ? CrossoverTable() : kEarlyCrossovers;
    ASSERT_EQ(wrong_results(*system, calls, table), "")
        << "seed " << seed << ": " << format("{} and {}", one.kind, other.kind) << " on "
        << world_size << " ranks";
  }
}

}  // namespace
}  // namespace cadre
