// Tests the cost of schedules in steps, partners and bytes, and which of their steps add.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cadre/core/collective/net/schedule.h"

namespace cadre {
namespace {

constexpr int kMostRanks = 17;

// Returns the number of ranks with which a rank exchanges messages.
size_t num_partners(const Schedule& schedule) {
  std::set<int> partners;
  for (const Step& step : schedule.steps) partners.insert({step.send_to, step.recv_from});
  partners.erase(kNobody);
  return partners.size();
}

// An inner rank of a tree moves the parts of its subtree, but the root moves the same bytes as in a
// linear schedule. A tree has one message for each child, or two if the parts of the child wrap
// around the rank numbers. So the root of a tree has as many partners as the tree has levels, while
// the root of a linear schedule exchanges messages with all ranks.
TEST(ScheduleCostTest, TreesHaveFewPartnersAndLinearOnesSendEveryByteOnce) {
  for (int world_size = 2; world_size <= kMostRanks; ++world_size) {
    const auto log = static_cast<size_t>(std::bit_width(static_cast<unsigned>(world_size - 1)));
    for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
      uint64_t linear_total = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        ScheduleKey key{.algorithm = Algorithm::kBinomialTree,
                        .kind = kind,
                        .rank = rank,
                        .world_size = world_size,
                        .count = 4,
                        .root = world_size / 2};
        const Schedule tree = make_schedule(key);
        const bool is_root = rank == key.root;
        EXPECT_LE(num_partners(tree), log) << tree.to_string();
        if (is_root) {
          EXPECT_EQ(num_partners(tree), log) << tree.to_string();
        }
        EXPECT_LE(tree.steps.size(), 3 * (log + 1));
        key.algorithm = Algorithm::kLinear;
        EXPECT_EQ(num_partners(make_schedule(key)), is_root ? world_size - 1u : 1u);
        EXPECT_EQ(make_schedule(key).scratch_count, 0u);
        linear_total += make_schedule(key).num_sent_elements();
      }
      EXPECT_EQ(linear_total, 4 * static_cast<uint64_t>(world_size - 1));
    }
  }
}

// The messages from one rank to another, in order. Each entry says whether the message belongs to
// the reduce steps (Schedule::num_reduce_steps) of the sender, or of the receiver.
struct MessageParts {
  std::vector<bool> sent;
  std::vector<bool> received;
};

// The reduce steps may run in another dtype than the other steps. So they must include all steps
// that add, and no step that only stores. A message must belong to the reduce steps of both its
// ranks or of neither, and after the reduce steps every element must be complete on some rank.
TEST(ScheduleCostTest, TheReducePartHoldsTheAdditionsAndNothingElse) {
  constexpr uint64_t kCount = 70;
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kRecursiveDoubling}) {
    for (int world_size = 2; world_size <= kMostRanks; ++world_size) {
      std::map<std::pair<int, int>, MessageParts> messages;
      std::vector<int> num_complete(kCount);
      for (int rank = 0; rank < world_size; ++rank) {
        const Schedule schedule = make_schedule({.algorithm = algorithm,
                                                 .kind = OpKind::kAllReduce,
                                                 .rank = rank,
                                                 .world_size = world_size,
                                                 .count = kCount});
        for (size_t i = 0; i < schedule.steps.size(); ++i) {
          const Step& step = schedule.steps[i];
          const bool reduces = i < schedule.num_reduce_steps;
          if (step.send_to != kNobody) messages[{rank, step.send_to}].sent.push_back(reduces);
          if (step.recv_from == kNobody) continue;
          messages[{step.recv_from, rank}].received.push_back(reduces);
          EXPECT_EQ(step.combine != Combine::kStore, reduces) << schedule.to_string();
          if (!step.completes) continue;
          EXPECT_TRUE(reduces) << schedule.to_string();
          for (uint64_t at = 0; at < step.recv.count; ++at) ++num_complete[step.recv.begin + at];
        }
      }
      for (const auto& [ranks, parts] : messages) {
        EXPECT_EQ(parts.sent, parts.received) << to_string(algorithm) << ": " << ranks.first
                                              << " to " << ranks.second << " of " << world_size;
      }
      EXPECT_THAT(num_complete, ::testing::Each(::testing::Ge(1)));
    }
  }
}

TEST(ScheduleCostTest, RingSendsTwiceTheShareOfTheOthers) {
  for (int world_size = 2; world_size <= kMostRanks; ++world_size) {
    const auto size = static_cast<uint64_t>(world_size);
    const uint64_t count = 12 * size;
    for (int rank = 0; rank < world_size; ++rank) {
      const ScheduleKey key{
          .kind = OpKind::kAllReduce, .rank = rank, .world_size = world_size, .count = count};
      EXPECT_EQ(make_schedule(key).num_sent_elements(), 2 * (size - 1) * count / size);
      EXPECT_EQ(make_schedule(key).steps.size(), 2 * (size - 1));
    }
  }
}

TEST(ScheduleCostTest, LogarithmicAlgorithmsTakeLogarithmicallyManySteps) {
  for (int world_size = 2; world_size <= kMostRanks; ++world_size) {
    const auto log = static_cast<size_t>(std::bit_width(static_cast<unsigned>(world_size - 1)));
    for (int rank = 0; rank < world_size; ++rank) {
      const auto steps_of = [&](Algorithm algorithm, OpKind kind) {
        return make_schedule({.algorithm = algorithm,
                              .kind = kind,
                              .rank = rank,
                              .world_size = world_size,
                              .count = 3})
            .steps.size();
      };
      EXPECT_EQ(steps_of(Algorithm::kDissemination, OpKind::kBarrier), log);
      EXPECT_LE(steps_of(Algorithm::kRecursiveDoubling, OpKind::kAllReduce), log + 1);
      EXPECT_LE(steps_of(Algorithm::kBinomialTree, OpKind::kBroadcast), log);
      EXPECT_LE(steps_of(Algorithm::kBruck, OpKind::kAllGather), 2 * log);
    }
  }
}

}  // namespace
}  // namespace cadre
