#include "cadre/core/schedule/simulate.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>

#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = PipelineScheduleKind;

constexpr double kRounding = 1e-9;

PipelineTimeline simulated(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  return simulate_pipeline(schedule, costs).value_or_throw();
}

double bubble_ms(const PipelineTimeline& timeline, int rank) {
  return timeline.makespan_ms - timeline.busy_ms[rank];
}

// The bubble of GPipe and 1F1B with p ranks is (p - 1)(F + B), where F and B are the times of a
// forward and a backward. With v stages on each rank, F and B are the times of one stage, which are
// v times shorter, and a microbatch passes the ranks v times. With fewer microbatches than ranks,
// each pass except the last one waits until the first microbatch has returned.
TEST(PipelineSimulateTest, BubblesWithoutSplitBackwardsAreThoseOfTheFormula) {
  constexpr std::array<StageCosts, 3> kCosts{{{.forward_ms = 1, .backward_ms = 2},
                                              {.forward_ms = 3, .backward_ms = 1},
                                              {.forward_ms = 2, .backward_ms = 5}}};
  int count = 0;
  for_each_pipeline([&](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    if (options.kind != Kind::kGPipe && options.kind != Kind::k1F1B &&
        options.kind != Kind::kInterleaved1F1B && options.kind != Kind::kLoopedBfs) {
      return;
    }
    for (const StageCosts& costs : kCosts) {
      const PipelineTimeline timeline = simulated(schedule, {.stages = {costs}});
      const int p = options.num_ranks;
      const int m = options.num_microbatches;
      const int v = *options.stages_per_rank;
      const double pair_ms = costs.forward_ms + costs.backward_ms;
      const double expected = pair_ms * (p - 1 + (v - 1) * std::max(0, p - m));
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_NEAR(bubble_ms(timeline, rank), expected, kRounding) << text_of(options);
        if (v == 1) {
          EXPECT_NEAR(timeline.bubble_share(rank), (p - 1.0) / (m + p - 1), kRounding);
        }
      }
      ++count;
    }
  });
  EXPECT_GT(count, 3000);
}

// The bubble of ZB-H1 with p ranks is (p - 1)(F + I - W), where F, I and W are the times of a
// forward, of the gradients of the inputs and of the gradients of the weights. This holds if there
// are at least p microbatches and W is at most I. With several stages on each rank the formula has
// the times of one stage.
TEST(PipelineSimulateTest, BubblesOfZeroBubbleSchedulesAreThoseOfTheFormula) {
  constexpr std::array<StageCosts, 4> kCosts{
      {{1, 2, 1, 1}, {1, 1.5, 1, 0.5}, {2, 5, 3, 2}, {2, 2, 1, 1}}};
  int count = 0;
  for_each_pipeline([&](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    const bool is_h1 = options.kind == Kind::kZbH1 || options.kind == Kind::kInterleavedZeroBubble;
    if (!is_h1 || options.num_microbatches < options.num_ranks) return;
    for (const StageCosts& costs : kCosts) {
      const PipelineTimeline timeline = simulated(schedule, {.stages = {costs}});
      EXPECT_NEAR(
          bubble_ms(timeline, 0),
          (options.num_ranks - 1) * (costs.forward_ms + costs.input_grad_ms - costs.weight_grad_ms),
          kRounding)
          << text_of(options);
      ++count;
    }
  });
  EXPECT_GT(count, 1000);
}

// If a forward, the gradients of the inputs and the gradients of the weights take the same time,
// and p ranks have at least 2p - 1 microbatches, no rank of ZB-V idles between its first and its
// last action. The only idle time is that rank r begins r forwards late.
TEST(PipelineSimulateTest, ZbVHasNoBubbleWithinARank) {
  for_each_pipeline([&](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    if (options.kind != Kind::kZbV || options.num_microbatches < 2 * options.num_ranks - 1) return;
    const PipelineTimeline timeline = simulated(schedule, {});
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      const auto& actions = timeline.ranks[rank];
      EXPECT_NEAR(actions.back().end_ms - actions.front().begin_ms, timeline.busy_ms[rank],
                  kRounding)
          << text_of(options) << " rank " << rank;
    }
    EXPECT_NEAR(bubble_ms(timeline, 0), options.num_ranks - 1, kRounding) << text_of(options);
  });
}

// If a forward (F) takes as long as the gradients of the inputs (I), and the gradients of the
// weights (W) at most as long, the bubble of DualPipeV with p ranks is (p - 1)(O + B - 3W) on the
// rank with the most overlaps. B is the time of a backward, and O that of a forward and a backward
// that overlap.
TEST(PipelineSimulateTest, TheBubbleOfDualPipeVIsThatOfTheFormula) {
  constexpr std::array<StageCosts, 3> kCosts{{{1, 2, 1, 1}, {1, 1.5, 1, 0.5}, {2, 3, 2, 1}}};
  int count = 0;
  for_each_pipeline([&](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    if (options.kind != Kind::kDualPipeV) return;
    for (const StageCosts& costs : kCosts) {
      for (const double share : {0.0, 0.5, 1.0}) {
        const double overlap_ms = costs.forward_ms + costs.backward_ms - share * costs.forward_ms;
        const PipelineTimeline timeline =
            simulated(schedule, {.stages = {costs}, .overlap_share = share});
        const double least_busy_ms = *std::ranges::min_element(timeline.busy_ms);
        const double expected_ms =
            (options.num_ranks - 1) * (overlap_ms + costs.backward_ms - 3 * costs.weight_grad_ms);
        EXPECT_NEAR(timeline.makespan_ms - least_busy_ms, expected_ms, kRounding)
            << text_of(options) << " share " << share;
        ++count;
      }
    }
  });
  EXPECT_GT(count, 300);
}

// GPipe is two flow shops of equal jobs, the forwards and the backwards. Each of them takes the sum
// of the stages' times, plus the longest stage's time for each further microbatch. Every message of
// the first forward and the last backward adds its time.
TEST(PipelineSimulateTest, UnequalStagesAndMessagesMakeGPipeAsLongAsTheFormula) {
  PipelineCosts costs{.stages = {}, .message_ms = 0.5};
  for (const double scale : {1.0, 3.0, 2.0, 0.5}) {
    costs.stages.push_back({.forward_ms = scale, .backward_ms = 2.5 * scale});
  }
  const PipelineTimeline timeline = simulated(make(Kind::kGPipe, 4, 6), costs);
  EXPECT_NEAR(timeline.makespan_ms, (6.5 + 5 * 3) * (1 + 2.5) + 2 * 3 * 0.5, kRounding);
  EXPECT_THAT(timeline.busy_ms, ElementsAre(21, 63, 42, 10.5));
  EXPECT_NEAR(timeline.bubble_share(1), 1 - 63 / timeline.makespan_ms, kRounding);
}

// Computes when the result of an action has arrived on the rank of the stage `to`; 0 if the
// schedule has no such action.
struct Ends {
  const PipelineSchedule& schedule;
  double message_ms;
  std::map<std::string, double> of;

  double at(std::string_view kinds, int stage, int microbatch, int to) const {
    for (const char kind : kinds) {
      const auto found = of.find(cadre::format("{}{}{}", stage, kind, microbatch));
      if (found == of.end()) continue;
      const bool is_sent = schedule.rank_of_stage[stage] != schedule.rank_of_stage[to];
      return found->second + (is_sent ? message_ms : 0);
    }
    return 0;
  }
};

// Every action begins exactly when the rank is free and the action's input has arrived.
TEST(PipelineSimulateTest, NothingBeginsEarlyOrLate) {
  for_each_pipeline([&](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    PipelineCosts costs{.stages = {}, .message_ms = 0.25};
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      costs.stages.push_back({1.0 + stage % 3, 2.5, 1.5 + stage % 2, 1});
    }
    const PipelineTimeline timeline = simulated(schedule, costs);
    Ends ends{schedule, costs.message_ms, {}};
    for (const auto& actions : timeline.ranks) {
      for (const TimedAction& timed : actions) {
        for (const PipelineAction& leaf : leaves_of(timed.action)) {
          ends.of[to_text(leaf)] = timed.end_ms;
        }
      }
    }
    for (const auto& actions : timeline.ranks) {
      double free_ms = 0;
      for (const TimedAction& timed : actions) {
        double ready_ms = free_ms;
        for (const PipelineAction& leaf : leaves_of(timed.action)) {
          const int stage = leaf.stage;
          const int microbatch = *leaf.microbatch;
          if (leaf.kind == PipelineActionKind::kForward) {
            ready_ms = std::max(ready_ms, ends.at("F", stage - 1, microbatch, stage));
          } else if (leaf.kind == PipelineActionKind::kWeightGrad) {
            ready_ms = std::max(ready_ms, ends.at("I", stage, microbatch, stage));
          } else {
            ready_ms = std::max({ready_ms, ends.at("F", stage, microbatch, stage),
                                 ends.at("BI", stage + 1, microbatch, stage)});
          }
        }
        ASSERT_EQ(timed.begin_ms, ready_ms) << text_of(options) << " " << to_text(timed.action);
        free_ms = timed.end_ms;
      }
    }
  });
}

TEST(PipelineSimulateTest, ATimelineHasTheLiveActivationsOfItsSchedule) {
  const PipelineTimeline timeline = simulated(make(Kind::k1F1B, 4, 8), {});
  EXPECT_THAT(timeline.peak_live_activations, ElementsAre(4, 3, 2, 1));
}

TEST(PipelineSimulateTest, TimesThatAreNoneAreRefused) {
  const PipelineSchedule schedule = make(Kind::kGPipe, 3, 2);
  const auto refusal = [&](const PipelineCosts& costs) {
    const auto timeline = simulate_pipeline(schedule, costs);
    return timeline.ok() ? "none" : timeline.error().message();
  };
  EXPECT_THAT(refusal({.stages = {{}, {}}}),
              HasSubstr("times are given for 2 stages, but the schedule has 3"));
  EXPECT_THAT(refusal({.stages = {}}), HasSubstr("times are given for 0 stages"));
  EXPECT_THAT(refusal({.stages = {{.forward_ms = -1}}}), HasSubstr("stage 0 takes -1 ms forward"));
  EXPECT_THAT(refusal({.stages = {{0, 0, 0, 0}}}), HasSubstr("one of them above 0"));
  EXPECT_THAT(refusal({.message_ms = std::numeric_limits<double>::quiet_NaN()}),
              HasSubstr("a message takes nan ms"));
  EXPECT_THAT(refusal({.overlap_share = 1.5}), HasSubstr("1.5 of an overlap is hidden"));
}

TEST(PipelineSimulateTest, ADeadlockIsRefused) {
  PipelineSchedule schedule = make(Kind::kGPipe, 2, 2);
  std::ranges::reverse(schedule.ranks[0]);
  EXPECT_THAT(simulate_pipeline(schedule, {}).error().message(), HasSubstr("deadlock"));
}

}  // namespace
}  // namespace cadre
