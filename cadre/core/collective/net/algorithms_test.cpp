// Runs schedules in memory, without buffers between ranks: a send and a receive happen only when
// both ranks have reached their steps. So a schedule that could deadlock on any network stops here.
// Each value records which ranks contributed to it, and in which order.
#include "cadre/core/collective/net/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/schedule.h"
#include "cadre/testing/core/exchange_reference.h"

namespace cadre {
namespace {

constexpr int kMaxScheduleRanks = 17;
constexpr std::array<uint64_t, 7> kScheduleCounts = {0, 1, 2, 7, 16, 17, 101};
constexpr int kBitsPerRank = 3;

// A symbolic element, used instead of a number: it records how it was computed.
struct Value {
  uint64_t contributions = 0;  // kBitsPerRank bits for each rank: how often the rank was added
  uint64_t history = 0;        // a hash that differs for (a+b)+c, a+(b+c) and (b+a)+c
  int completions = 0;

  friend bool operator==(const Value&, const Value&) = default;
};

Value value_of(int rank, uint64_t index) {
  return {uint64_t{1} << (kBitsPerRank * rank),
          (static_cast<uint64_t>(rank) * 1'000'003 + index + 1) * 0x9e3779b97f4a7c15ULL, 0};
}

Value add(const Value& a, const Value& b) {
  const uint64_t mixed = a.history * 0xbf58476d1ce4e5b9ULL + std::rotl(b.history, 17);
  return {a.contributions + b.contributions, mixed ^ (mixed >> 29), a.completions + b.completions};
}

uint64_t everyone_once(int world_size) {
  uint64_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, 0).contributions;
  return sum;
}

struct RankState {
  Schedule schedule;
  std::vector<Value> input;
  std::vector<Value> output;
  std::vector<Value> scratch;
  bool is_in_place = false;
  size_t at = 0;
  bool sent = false;
  bool received = false;
  std::vector<Value> outgoing;  // a copy of the elements to send, made when the step began

  bool is_done() const { return at == schedule.steps.size(); }
  const Step& step() const { return schedule.steps[at]; }
  Value* data(const Block& block) {
    std::vector<Value>& memory = block.slot == Slot::kScratch                 ? scratch
                                 : block.slot == Slot::kInput && !is_in_place ? input
                                                                              : output;
    EXPECT_LE(block.begin + block.count, memory.size()) << schedule.to_string();
    return memory.data() + block.begin;
  }
  void begin_step() {
    sent = received = false;
    if (is_done()) return;
    sent = step().send_to == kNobody;
    received = step().recv_from == kNobody;
    const Value* from = sent ? nullptr : data(step().send);
    outgoing.assign(from, from + (sent ? 0 : step().send.count));
    if (!sent && !received) expect_no_partial_overlap();
  }
  void expect_no_partial_overlap() {
    const Value* a = data(step().send);
    const Value* b = data(step().recv);
    const bool is_disjoint = a + step().send.count <= b || b + step().recv.count <= a;
    EXPECT_TRUE(is_disjoint || (a == b && step().send.count == step().recv.count))
        << schedule.to_string();
  }
  void take(const std::vector<Value>& incoming) {
    ASSERT_EQ(incoming.size(), step().recv.count) << schedule.to_string();
    const Value* local = step().combine == Combine::kStore ? nullptr : data(step().local);
    Value* target = data(step().recv);
    for (size_t i = 0; i < incoming.size(); ++i) {
      Value result = incoming[i];
      if (step().combine == Combine::kReceivedFirst) result = add(incoming[i], local[i]);
      if (step().combine == Combine::kLocalFirst) result = add(local[i], incoming[i]);
      result.completions += step().completes ? 1 : 0;
      target[i] = result;
    }
    received = true;
  }
};

// Returns true if all ranks reach the end of their schedule.
bool run(std::vector<RankState>& ranks) {
  for (RankState& rank : ranks) rank.begin_step();
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t from = 0; from < ranks.size(); ++from) {
      RankState& sender = ranks[from];
      if (!sender.is_done() && !sender.sent) {
        RankState& receiver = ranks[static_cast<size_t>(sender.step().send_to)];
        if (!receiver.is_done() && !receiver.received &&
            receiver.step().recv_from == static_cast<int>(from)) {
          receiver.take(sender.outgoing);
          sender.sent = true;
          progress = true;
        }
      }
      while (!sender.is_done() && sender.sent && sender.received) {
        ++sender.at;
        sender.begin_step();
        progress = true;
      }
    }
  }
  return std::ranges::all_of(ranks, &RankState::is_done);
}

struct ScheduleCase {
  Algorithm algorithm;
  OpKind kind;
};

bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

// Returns the length of a rank's input in units of key.count, as Backend defines it; 0 if the
// buffer is not used, so that no step may access it.
uint64_t input_parts(const ScheduleKey& key, int rank) {
  const auto size = static_cast<uint64_t>(key.world_size);
  if (key.kind == OpKind::kScatter) return rank == key.root ? size : 0;
  return key.kind == OpKind::kReduceScatter || key.kind == OpKind::kAllToAll ? size : 1;
}
uint64_t output_parts(const ScheduleKey& key, int rank) {
  const auto size = static_cast<uint64_t>(key.world_size);
  if (key.kind == OpKind::kGather) return rank == key.root ? size : 0;
  if (key.kind == OpKind::kReduce) return rank == key.root ? 1 : 0;
  return key.kind == OpKind::kAllGather || key.kind == OpKind::kAllToAll ? size : 1;
}

// Copies the part of its own input that a rank keeps. The engine does so before it runs the
// schedule.
void copy_own_part(const ScheduleKey& key, int rank, RankState& state) {
  const auto own = static_cast<ptrdiff_t>(key.count * static_cast<uint64_t>(rank));
  const auto count = static_cast<ptrdiff_t>(key.count);
  const bool is_root = rank == key.root;
  const auto in = state.input.begin();
  const auto out = state.output.begin();
  if (key.kind == OpKind::kBroadcast && is_root) state.output = state.input;
  if (key.kind == OpKind::kAllGather || (key.kind == OpKind::kGather && is_root)) {
    std::copy(in, in + count, out + own);
  }
  if (key.kind == OpKind::kScatter && is_root) std::copy(in + own, in + own + count, out);
  if (key.kind == OpKind::kAllToAll) std::copy(in + own, in + own + count, out + own);
}

std::vector<RankState> make_ranks(const ScheduleKey& key, bool is_in_place) {
  std::vector<RankState> ranks(static_cast<size_t>(key.world_size));
  for (int rank = 0; rank < key.world_size; ++rank) {
    RankState& state = ranks[static_cast<size_t>(rank)];
    ScheduleKey own = key;
    own.rank = rank;
    state.schedule = make_schedule(own);
    state.is_in_place = is_in_place;
    for (uint64_t i = 0; i < key.count * input_parts(key, rank); ++i) {
      state.input.push_back(value_of(rank, i));
    }
    state.output.resize(key.count * output_parts(key, rank));
    state.scratch.resize(state.schedule.scratch_count);
    if (is_in_place) state.output = state.input;
    copy_own_part(key, rank, state);
  }
  return ranks;
}

// Returns the expected element i of a rank's output for operations that only move data.
Value moved_value(const ScheduleKey& key, int rank, uint64_t i) {
  if (key.kind == OpKind::kBroadcast) return value_of(key.root, i);
  if (key.kind == OpKind::kScatter) {
    return value_of(key.root, static_cast<uint64_t>(rank) * key.count + i);
  }
  const auto from = static_cast<int>(i / key.count);
  const uint64_t skipped =
      key.kind == OpKind::kAllToAll ? static_cast<uint64_t>(rank) * key.count : 0;
  return value_of(from, skipped + i % key.count);
}

void expect_result(const ScheduleKey& key, const std::vector<RankState>& ranks) {
  const bool reduces = key.kind == OpKind::kAllReduce || key.kind == OpKind::kReduce ||
                       key.kind == OpKind::kReduceScatter;
  for (int rank = 0; rank < key.world_size; ++rank) {
    const RankState& state = ranks[static_cast<size_t>(rank)];
    for (uint64_t i = 0; i < state.output.size(); ++i) {
      const Value& value = state.output[i];
      if (!reduces) {
        ASSERT_EQ(value, moved_value(key, rank, i)) << state.schedule.to_string();
        continue;
      }
      ASSERT_EQ(value.contributions, everyone_once(key.world_size)) << state.schedule.to_string();
      ASSERT_EQ(value.completions, 1) << state.schedule.to_string();
      if (key.kind == OpKind::kAllReduce) {
        ASSERT_EQ(value, ranks[0].output[i]) << "the order of additions differs between ranks";
      }
    }
  }
}

class AlgorithmTest : public ::testing::TestWithParam<ScheduleCase> {};

INSTANTIATE_TEST_SUITE_P(
    All, AlgorithmTest,
    ::testing::Values(ScheduleCase{Algorithm::kRing, OpKind::kAllReduce},
                      ScheduleCase{Algorithm::kRecursiveDoubling, OpKind::kAllReduce},
                      ScheduleCase{Algorithm::kRing, OpKind::kReduceScatter},
                      ScheduleCase{Algorithm::kRing, OpKind::kAllGather},
                      ScheduleCase{Algorithm::kBruck, OpKind::kAllGather},
                      ScheduleCase{Algorithm::kBinomialTree, OpKind::kBroadcast},
                      ScheduleCase{Algorithm::kChain, OpKind::kBroadcast},
                      ScheduleCase{Algorithm::kBinomialTree, OpKind::kReduce},
                      ScheduleCase{Algorithm::kRing, OpKind::kReduce},
                      ScheduleCase{Algorithm::kBinomialTree, OpKind::kGather},
                      ScheduleCase{Algorithm::kLinear, OpKind::kGather},
                      ScheduleCase{Algorithm::kBinomialTree, OpKind::kScatter},
                      ScheduleCase{Algorithm::kLinear, OpKind::kScatter},
                      ScheduleCase{Algorithm::kPairwise, OpKind::kAllToAll}),
    [](const auto& test) {
      std::string name = cadre::format("{}_{}", to_string(test.param.algorithm), test.param.kind);
      std::ranges::replace(name, ' ', '_');
      return name;
    });

bool have_no_idle_step(const std::vector<RankState>& ranks) {
  return std::ranges::all_of(ranks, [](const RankState& rank) {
    return std::ranges::all_of(rank.schedule.steps, [](const Step& step) {
      return step.send_to != kNobody || step.recv_from != kNobody;
    });
  });
}

TEST_P(AlgorithmTest, EveryRankEndsWithTheResultAndNoneWaitsForEver) {
  const auto [algorithm, kind] = GetParam();
  ASSERT_TRUE(implements(algorithm, kind));
  EXPECT_TRUE(make_schedule({.algorithm = algorithm, .kind = kind, .count = 8}).steps.empty());
  for (int world_size = 2; world_size <= kMaxScheduleRanks; ++world_size) {
    for (const uint64_t count : kScheduleCounts) {
      const int num_roots = has_root(kind) ? world_size : 1;
      for (int root = 0; root < num_roots; ++root) {
        const ScheduleKey key{.algorithm = algorithm,
                              .kind = kind,
                              .world_size = world_size,
                              .count = count,
                              .root = root,
                              .segment_count = 5};
        std::vector<RankState> ranks = make_ranks(key, false);
        ASSERT_TRUE(have_no_idle_step(ranks)) << ranks[0].schedule.to_string();
        ASSERT_TRUE(run(ranks)) << "stuck: " << ranks[0].schedule.to_string();
        expect_result(key, ranks);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(AlgorithmsTest, AllReduceWorksInPlaceWithTheSameOrder) {
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kRecursiveDoubling}) {
    for (int world_size = 2; world_size <= kMaxScheduleRanks; ++world_size) {
      const ScheduleKey key{.algorithm = algorithm,
                            .kind = OpKind::kAllReduce,
                            .world_size = world_size,
                            .count = 23};
      std::vector<RankState> in_place = make_ranks(key, true);
      std::vector<RankState> apart = make_ranks(key, false);
      ASSERT_TRUE(run(in_place));
      ASSERT_TRUE(run(apart));
      expect_result(key, in_place);
      EXPECT_EQ(in_place[0].output, apart[0].output);
    }
  }
}

// Tests every root, with separate buffers and in place.
TEST(AlgorithmsTest, ReduceAddsInTheOrderOfTheAllReduceThatBelongsToIt) {
  const std::array<std::pair<Algorithm, Algorithm>, 2> pairs = {
      {{Algorithm::kRing, Algorithm::kRing},
       {Algorithm::kBinomialTree, Algorithm::kRecursiveDoubling}}};
  for (const auto& [algorithm, of_all_reduce] : pairs) {
    for (int world_size = 2; world_size <= kMaxScheduleRanks; ++world_size) {
      ScheduleKey key{.algorithm = of_all_reduce,
                      .kind = OpKind::kAllReduce,
                      .world_size = world_size,
                      .count = 23};
      std::vector<RankState> all_reduce = make_ranks(key, false);
      ASSERT_TRUE(run(all_reduce));
      key.algorithm = algorithm;
      key.kind = OpKind::kReduce;
      for (int root = 0; root < world_size; ++root) {
        key.root = root;
        const auto at_root = static_cast<size_t>(root);
        for (const bool is_in_place : {false, true}) {
          std::vector<RankState> reduce = make_ranks(key, false);
          reduce[at_root].is_in_place = is_in_place;
          if (is_in_place) reduce[at_root].output = reduce[at_root].input;
          ASSERT_TRUE(run(reduce));
          ASSERT_EQ(reduce[at_root].output, all_reduce[at_root].output)
              << reduce[at_root].schedule.to_string();
        }
      }
    }
  }
}

TEST(AlgorithmsTest, AllToAllOfAnySizesMovesEachPartOnceAndSendsNoEmptyOne) {
  for (int world_size = 1; world_size <= kMaxScheduleRanks; ++world_size) {
    for (const uint64_t seed : {1, 2, 3}) {
      const SizeMatrix sizes = random_sizes(world_size, 9, seed);
      std::vector<RankState> ranks(static_cast<size_t>(world_size));
      for (int rank = 0; rank < world_size; ++rank) {
        const auto me = static_cast<size_t>(rank);
        const auto received = received_sizes(sizes, rank);
        ranks[me].schedule = make_all_to_all_v_schedule(rank, {sizes[me], received});
        ranks[me].input.resize(std::accumulate(sizes[me].begin(), sizes[me].end(), size_t{0}));
        for (size_t i = 0; i < ranks[me].input.size(); ++i) ranks[me].input[i] = value_of(rank, i);
        ranks[me].output.resize(std::accumulate(received.begin(), received.end(), size_t{0}));
        for (const Step& step : ranks[me].schedule.steps) {
          EXPECT_TRUE(step.send_to == kNobody || step.send.count > 0);
          EXPECT_TRUE(step.recv_from == kNobody || step.recv.count > 0);
        }
      }
      ASSERT_TRUE(run(ranks)) << "stuck: " << ranks[0].schedule.to_string();
      for (int rank = 0; rank < world_size; ++rank) {
        auto at = ranks[static_cast<size_t>(rank)].output.begin();
        for (int from = 0; from < world_size; ++from) {
          const auto& row = sizes[static_cast<size_t>(from)];
          const auto to = row.begin() + rank;
          const uint64_t begin = std::accumulate(row.begin(), to, uint64_t{0});
          for (uint64_t i = 0; i < *to; ++i, ++at) {
            if (from == rank) continue;  // the engine copies this part
            ASSERT_EQ(*at, value_of(from, begin + i));
          }
        }
      }
    }
  }
}

// A barrier is correct if each rank's last step depends on every rank's first step.
TEST(AlgorithmsTest, NobodyLeavesABarrierBeforeAllHaveEntered) {
  for (int world_size = 2; world_size <= kMaxScheduleRanks; ++world_size) {
    const ScheduleKey key{
        .algorithm = Algorithm::kDissemination, .kind = OpKind::kBarrier, .world_size = world_size};
    std::vector<RankState> ranks = make_ranks(key, false);
    std::vector<uint64_t> heard(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) heard[i] = uint64_t{1} << i;
    for (size_t step = 0; step < ranks[0].schedule.steps.size(); ++step) {
      std::vector<uint64_t> before = heard;
      for (size_t i = 0; i < ranks.size(); ++i) {
        heard[i] |= before[static_cast<size_t>(ranks[i].schedule.steps[step].recv_from)];
      }
    }
    for (const uint64_t mask : heard) EXPECT_EQ(mask, (uint64_t{1} << world_size) - 1);
    EXPECT_TRUE(run(ranks));
  }
}

TEST(AlgorithmsTest, AWorldOfOneHasNoSteps) {
  EXPECT_TRUE(make_schedule({.kind = OpKind::kAllReduce, .count = 8}).steps.empty());
}

}  // namespace
}  // namespace cadre
