// Peers' memory under death: rounds of all_reduce on symmetric memory while ranks are killed at
// random; survivors rebuild the group and go on, with tensors still in the old memory.
//
// CADRE_CHAOS_ROUNDS sets the number of rounds (default 200; `make chaos` runs 10,000), and
// CADRE_CHAOS_SEED the seed, which decides worlds, victims and moments.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <deque>
#include <iostream>
#include <string>

#include "cadre/base/format.h"
#include "cadre/base/random.h"
#include "cadre/testing/leftovers.h"
#include "job.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;

constexpr int kRoundsPerJob = 100;
constexpr size_t kCount = 40'000;  // floats: large enough to be reduced in place
// A rank may die before it connects: the others give it up after this time.
constexpr Duration kConnectTime = milliseconds(1500);
constexpr size_t kNumKept = 3;  // buffers of earlier groups that stay in use

uint64_t from_environment(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// One rank's life: rounds in one group, and the next group when that failed.
class Survivor {
 public:
  Survivor(RankContext& context, Membership membership)
      : context_(context), membership_(std::move(membership)) {}

  void live() {
    while (round_ < kRoundsPerJob) {
      std::unique_ptr<Communicator> group;
      try {
        group = testing::connect(context_, membership_, {}, kConnectTime);
        run_rounds(*group);
        group->close(context_.system.deadline_in(seconds(5)));
      } catch (const Error& error) {
        require(error.code() != ErrorCode::kInternal, error.message());
        rejoin_without(group == nullptr ? std::vector<Rank>() : group->lost_ranks());
      }
    }
    context_.output = format("{} rebuilt", num_rebuilds_);
  }

 private:
  void run_rounds(Communicator& group) {
    agree_on_round(group);
    buffers_.push_back(group.allocate_symmetric(kCount * sizeof(float)));
    if (buffers_.size() > kNumKept) buffers_.pop_front();
    for (; round_ < kRoundsPerJob; ++round_) {
      const Bytes bytes = buffers_.back()->local();
      const std::span<float> values(reinterpret_cast<float*>(bytes.data()), kCount);
      const auto value_of = [&](size_t i) {
        return static_cast<float>((i + static_cast<size_t>(round_)) % 97);
      };
      for (size_t i = 0; i < kCount; ++i)
        values[i] = static_cast<float>(group.rank() + 1) * value_of(i);
      group.all_reduce(bytes, bytes, DType::kFloat32, ReduceOp::kSum);
      const int world = group.world_size();
      const auto factor = static_cast<float>(world * (world + 1) / 2);
      for (size_t i = 0; i < kCount; ++i) {
        if (values[i] != factor * value_of(i)) {
          throw Error(ErrorCode::kInternal, format("wrong sum in round {} at {}: {} instead of {}",
                                                   round_, i, values[i], factor * value_of(i)));
        }
      }
      touch_old_memory();
    }
  }

  // Survivors may be one round apart: all go back to the earliest.
  void agree_on_round(Communicator& group) {
    int64_t round = round_;
    const Bytes bytes = std::as_writable_bytes(std::span(&round, 1));
    group.all_reduce(bytes, bytes, DType::kInt64, ReduceOp::kMin);
    round_ = static_cast<int>(round);
  }

  void touch_old_memory() {
    for (size_t i = 0; i + 1 < buffers_.size(); ++i) {
      buffers_[i]->local()[0] = static_cast<std::byte>(round_);
      require(buffers_[i]->local()[0] == static_cast<std::byte>(round_), "old memory is ours");
    }
  }

  void rejoin_without(const std::vector<Rank>& lost) {
    membership_ =
        rejoin(context_.system, membership_, lost, context_.system.deadline_in(seconds(4)))
            .value_or_throw();
    ++num_rebuilds_;
  }

  RankContext& context_;
  Membership membership_;
  int round_ = 0;
  int num_rebuilds_ = 0;
  std::deque<std::shared_ptr<SymmetricBuffer>> buffers_;
};

// One job of 2 to 4 ranks, of which at least one lives to the end.
struct JobPlan {
  int world_size;
  std::vector<std::pair<int, Duration>> kills;  // who, and how long after the kill before
};

JobPlan make_plan(Random& random) {
  JobPlan plan{2 + static_cast<int>(random.below(3)), {}};
  std::vector<int> victims;
  for (int rank = 0; rank < plan.world_size; ++rank) victims.push_back(rank);
  const auto num_kills = 1 + random.below(static_cast<uint64_t>(plan.world_size) - 1);
  for (uint64_t i = 0; i < num_kills; ++i) {
    const auto at = static_cast<ptrdiff_t>(random.below(victims.size()));
    const auto wait = milliseconds(5 + random.below(35));
    plan.kills.emplace_back(victims[static_cast<size_t>(at)], wait);
    victims.erase(victims.begin() + at);
  }
  return plan;
}

void run_job_under_kills(const JobPlan& plan, int& num_kills, int& num_rebuilds) {
  const auto system = os::make_native_system();
  testing::JobOptions options{.world_size = plan.world_size};
  options.processes.time_limit = seconds(60);
  options.processes.disturb = [&](std::span<const int> pids) {
    for (const auto& [rank, wait] : plan.kills) {
      testing::nap(*system, wait);
      ::kill(pids[static_cast<size_t>(rank)], SIGKILL);
    }
  };
  const auto result = testing::run_job(options, [](RankContext& context, const Membership& m) {
    const testing::Resources before = testing::count_resources();
    { Survivor(context, m).live(); }
    const std::string left = testing::leftovers_since(before);
    require(left.empty(), left);
  });
  for (size_t i = 0; i < result.ranks.size(); ++i) {
    const auto& rank = result.ranks[i];
    // A victim may have come to its end before its turn.
    if (rank.signal == SIGKILL) {
      ++num_kills;
    } else {
      EXPECT_EQ(rank.failure, "") << "rank " << i;
      num_rebuilds = std::max(num_rebuilds, std::atoi(rank.output.c_str()));
    }
  }
}

TEST(Chaos, SurvivorsOfRandomKillsKeepTheRightSumsAndLeaveNothing) {
  const auto rounds = from_environment("CADRE_CHAOS_ROUNDS", 200);
  const auto seed = from_environment("CADRE_CHAOS_SEED", 20261121);
  std::cout << "seed " << seed << ", " << rounds << " rounds\n";
  Random random(seed);
  const testing::Resources before = testing::count_resources();
  int num_kills = 0;
  uint64_t num_rebuilds = 0;
  uint64_t done = 0;
  for (; done < rounds && !HasFailure(); done += kRoundsPerJob) {
    int rebuilds = 0;
    run_job_under_kills(make_plan(random), num_kills, rebuilds);
    num_rebuilds += static_cast<uint64_t>(rebuilds);
  }
  std::cout << done << " rounds, " << num_kills << " ranks killed, " << num_rebuilds
            << " groups rebuilt\n";
  EXPECT_GT(num_kills, 0);
  EXPECT_GT(num_rebuilds, 0u);
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre
