// Ranks that call different operations over TCP: whatever a rank has received by then, it never
// returns OK with a wrong result.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

// Both algorithms of each operation on the counts below.
constexpr CrossoverTable kEarlyCrossovers = {.all_reduce_ring_bytes = 1000,
                                             .broadcast_chain_bytes = 1000,
                                             .all_gather_ring_bytes = 1000,
                                             .chain_segment_bytes = 4000,
                                             .gather_linear_bytes = 1000};

struct Call {
  OpKind kind = OpKind::kBarrier;
  uint64_t count = 0;  // int32 elements of each rank's part
  int root = 0;        // for operations with a root
};

using Numbers = std::vector<int32_t>;

// Element `index` of what a rank brings; sums of few of them are unequal to every one of them.
int32_t number_from(int rank, uint64_t index) {
  return (rank + 1) * 1'000'003 + static_cast<int32_t>(index) * 7919;
}

Numbers numbers_from(int rank, uint64_t begin, uint64_t count) {
  Numbers numbers;
  for (uint64_t i = 0; i < count; ++i) numbers.push_back(number_from(rank, begin + i));
  return numbers;
}

Numbers summed(int world_size, uint64_t begin, uint64_t count) {
  Numbers sums(count);
  for (int rank = 0; rank < world_size; ++rank) {
    for (uint64_t i = 0; i < count; ++i) sums[i] += number_from(rank, begin + i);
  }
  return sums;
}

// `begin` and `count` elements of every rank, one rank after the other.
Numbers concatenated(int world_size, uint64_t begin, uint64_t count) {
  Numbers all;
  for (int rank = 0; rank < world_size; ++rank) {
    const Numbers part = numbers_from(rank, begin, count);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

struct Outcome {
  Status status;
  Numbers output;
};

Outcome run_call(EngineRank& engine, const Call& call, int rank, int world_size) {
  const uint64_t all = call.count * static_cast<uint64_t>(world_size);
  const bool is_root = rank == call.root;
  const auto bytes = [](Numbers& numbers) { return std::as_writable_bytes(std::span(numbers)); };
  Numbers part = numbers_from(rank, 0, call.count);
  Numbers whole = numbers_from(rank, 0, all);
  Numbers out(call.count);
  Numbers out_of_all(all);
  const ReduceKind sum{DType::kInt32, ReduceOp::kSum};
  switch (call.kind) {
    case OpKind::kBroadcast: {
      Numbers data = is_root ? part : Numbers(call.count);
      return {engine.broadcast(bytes(data), call.root), data};
    }
    case OpKind::kAllReduce:
      return {engine.all_reduce(bytes(part), bytes(out), sum.dtype, sum.op), out};
    case OpKind::kReduceScatter:
      return {engine.reduce_scatter(bytes(whole), bytes(out), sum.dtype, sum.op), out};
    case OpKind::kAllGather:
      return {engine.all_gather(bytes(part), bytes(out_of_all)), out_of_all};
    case OpKind::kReduce:
      return {engine.reduce(bytes(part), bytes(out), sum, call.root), is_root ? out : Numbers()};
    case OpKind::kGather:
      return {engine.gather(bytes(part), bytes(out_of_all), call.root),
              is_root ? out_of_all : Numbers()};
    case OpKind::kScatter:
      return {engine.scatter(bytes(whole), bytes(out), call.root), out};
    case OpKind::kAllToAll:
      return {engine.all_to_all(bytes(whole), bytes(out_of_all)), out_of_all};
    default:
      return {engine.barrier(), {}};
  }
}

// What the call gives when all ranks make it. None for a barrier, which nobody may leave unless all
// have entered.
std::optional<Numbers> expected_of(const Call& call, int rank, int world_size) {
  const uint64_t own = call.count * static_cast<uint64_t>(rank);
  const bool is_root = rank == call.root;
  switch (call.kind) {
    case OpKind::kBroadcast:
      return numbers_from(call.root, 0, call.count);
    case OpKind::kAllReduce:
      return summed(world_size, 0, call.count);
    case OpKind::kReduceScatter:
      return summed(world_size, own, call.count);
    case OpKind::kAllGather:
      return concatenated(world_size, 0, call.count);
    case OpKind::kReduce:
      return is_root ? summed(world_size, 0, call.count) : Numbers();
    case OpKind::kGather:
      return is_root ? concatenated(world_size, 0, call.count) : Numbers();
    case OpKind::kScatter:
      return numbers_from(call.root, own, call.count);
    case OpKind::kAllToAll:
      return concatenated(world_size, own, call.count);
    default:
      return std::nullopt;
  }
}

// calls[r] is what rank r calls. Empty, or what was wrong.
std::string wrong_results(os::System& system, const std::vector<Call>& calls,
                          const CrossoverTable& table) {
  const int world_size = static_cast<int>(calls.size());
  const TransportGroup group(system, TransportKind::kTcp, world_size);
  return group.run([&](Transport& transport) {
    const int rank = transport.rank();
    EngineRank engine(system, transport, table);
    engine.barrier().value_or_throw();
    // A rank that nobody tells of the mismatch waits: over this engine there is no monitor.
    engine.set_patience(milliseconds(100));
    const Call& call = calls[static_cast<size_t>(rank)];
    const Outcome outcome = run_call(engine, call, rank, world_size);
    if (!outcome.status.ok()) return;
    const auto expected = expected_of(call, rank, world_size);
    require(expected.has_value(), "it left the barrier");
    const auto differs = std::ranges::mismatch(outcome.output, *expected);
    require(outcome.output == *expected,
            format("{} of {} elements returned OK with a wrong element {}", call.kind, call.count,
                   differs.in1 - outcome.output.begin()));
  });
}

// Rank 0 learns of the mismatch from rank 2 while rank 1 waits for rank 0's second message.
TEST(NetEngineDisagreementTest, ARefusalIsNeverTakenForPayload) {
  const auto system = os::make_native_system();
  const Call call{.kind = OpKind::kReduceScatter, .count = 1};
  for (int attempt = 0; attempt < 20; ++attempt) {
    ASSERT_EQ(wrong_results(*system, {call, call, Call()}, {}), "") << "attempt " << attempt;
  }
}

Call random_call(Random& random, int world_size) {
  constexpr std::array kKinds = {OpKind::kBroadcast,     OpKind::kAllReduce, OpKind::kAllGather,
                                 OpKind::kReduceScatter, OpKind::kReduce,    OpKind::kGather,
                                 OpKind::kScatter,       OpKind::kAllToAll,  OpKind::kBarrier};
  constexpr std::array<uint64_t, 5> kCounts = {1, 3, 100, 5000, 200'000};
  Call call{.kind = kKinds[random.below(kKinds.size())]};
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
    const Call one = random_call(random, world_size);
    Call other = one;
    while (other.kind == one.kind) other = random_call(random, world_size);
    std::vector<Call> calls(static_cast<size_t>(world_size), one);
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
