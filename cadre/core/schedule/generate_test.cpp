#include "cadre/core/schedule/generate.h"

#include <gmock/gmock.h>

#include <array>
#include <set>

#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Le;
using Kind = PipelineScheduleKind;

std::string refusal(const PipelineScheduleOptions& options) {
  const auto schedule = make_pipeline_schedule(options);
  return schedule.ok() ? "none" : schedule.error().message();
}

TEST(PipelineGenerateTest, EverySchedulePassesTheChecker) {
  const int count = for_each_pipeline([](const auto& options, const PipelineSchedule& schedule) {
    const Status status = check_pipeline(schedule);
    ASSERT_TRUE(status.ok()) << text_of(options) << ": " << status.error().message();
    EXPECT_EQ(schedule.num_ranks(), options.num_ranks);
    EXPECT_EQ(schedule.num_stages(), options.num_ranks * *options.stages_per_rank);
    EXPECT_EQ(schedule.num_microbatches, options.num_microbatches);
  });
  // All 112 pairs of p ranks and m microbatches are possible for gpipe, 1f1b, zb-h1 and zb-v, and
  // with 1 to 4 stages on each rank for looped-bfs. dualpipe-v requires 2p <= m, and the
  // interleaved schedules require that the number of rounds, max(1, m / p), divides m.
  int num_pairs_of_dualpipe = 0;
  int num_pairs_of_interleaved = 0;
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (int microbatches = 1; microbatches <= 16; ++microbatches) {
      num_pairs_of_dualpipe += microbatches >= 2 * ranks ? 1 : 0;
      num_pairs_of_interleaved += microbatches % std::max(1, microbatches / ranks) == 0 ? 1 : 0;
    }
  }
  EXPECT_EQ(count, 4 * 112 + 4 * 112 + num_pairs_of_dualpipe + 2 * 4 * num_pairs_of_interleaved);
}

// The figures of the papers show these schedules.
TEST(PipelineGenerateTest, SmallSchedulesAreThoseOfThePapers) {
  EXPECT_EQ(to_csv(make(Kind::kGPipe, 2, 2)), "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n");
  EXPECT_EQ(to_csv(make(Kind::k1F1B, 2, 3)),
            "0F0,0F1,0B0,0F2,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n");
  EXPECT_EQ(to_csv(make(Kind::kInterleaved1F1B, 2, 2)),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\r\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\r\n");
  EXPECT_EQ(to_csv(make(Kind::kLoopedBfs, 2, 2)),
            "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\r\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\r\n");
  EXPECT_EQ(to_csv(make(Kind::kZbH1, 2, 3)),
            "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\r\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\r\n");
  EXPECT_EQ(to_csv(make(Kind::kZbV, 2, 1)),
            "0F0,3F0,3I0,3W0,0I0,0W0\r\n"
            "1F0,2F0,2I0,2W0,1I0,1W0\r\n");
  EXPECT_EQ(to_csv(make(Kind::kDualPipeV, 2, 4)),
            "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,"
            "(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\r\n"
            "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,"
            "(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\r\n");
}

// The papers state how many microbatches have live activations on a rank of p: at most p with 1F1B
// and ZB-H1, all with GPipe. A V schedule keeps at most 2p activations, each of half of a rank's
// layers, and DualPipeV one more.
TEST(PipelineGenerateTest, LiveActivationsStayWithinTheBoundsOfThePapers) {
  for_each_pipeline([](const PipelineScheduleOptions& options, const PipelineSchedule& schedule) {
    const std::vector<int> peaks = peak_live_activations(schedule);
    const int ranks = options.num_ranks;
    const int all = options.num_microbatches * *options.stages_per_rank;
    // The number of forwards that run on the rank's stages except the last one before the rank's
    // first backward.
    const int other_passes = (*options.stages_per_rank - 1) * options.num_microbatches /
                             std::max(1, options.num_microbatches / ranks);
    SCOPED_TRACE(text_of(options));
    switch (options.kind) {
      case Kind::kGPipe:
      case Kind::kLoopedBfs:
        EXPECT_THAT(peaks, Each(all));
        break;
      case Kind::k1F1B:
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(peaks[rank], std::min(ranks - rank, all));
        }
        break;
      case Kind::kZbH1:
        EXPECT_THAT(peaks, Each(std::min(ranks, all)));
        break;
      case Kind::kZbV:
        EXPECT_THAT(peaks, Each(Le(2 * ranks)));
        break;
      case Kind::kDualPipeV:
        EXPECT_THAT(peaks, Each(Le(2 * ranks + 1)));
        break;
      case Kind::kInterleaved1F1B:
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(peaks[rank], std::min(other_passes + 2 * (ranks - 1 - rank) + 1, all));
        }
        break;
      case Kind::kInterleavedZeroBubble:
        EXPECT_THAT(peaks, Each(std::min(other_passes + ranks, all)));
        break;
    }
  });
}

TEST(PipelineGenerateTest, PlacementsAreLoopsAndVs) {
  EXPECT_THAT(place_stages(StagePlacement::kLoop, {3, 2}), ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(place_stages(StagePlacement::kV, {3, 3}), ElementsAre(0, 1, 2, 2, 1, 0, 0, 1, 2));
}

TEST(PipelineGenerateTest, WhatAScheduleCannotDoIsRefusedWithItsNumbers) {
  EXPECT_EQ(refusal({.kind = Kind::kDualPipeV, .num_ranks = 4, .num_microbatches = 7}),
            "dualpipe-v: 7 microbatches for 8 stages (4 ranks with 2 each); it needs at least as "
            "many microbatches as stages");
  EXPECT_EQ(
      refusal({.kind = Kind::kInterleaved1F1B, .num_ranks = 4, .num_microbatches = 9}),
      "interleaved-1f1b: 9 microbatches on 4 ranks make 2 rounds (9 / 4, rounded down), and 9 "
      "is not a multiple of 2; take 8 or 12 microbatches");
  EXPECT_THAT(
      refusal({.kind = Kind::kInterleavedZeroBubble, .num_ranks = 4, .num_microbatches = 9}),
      HasSubstr("take 8 or 12 microbatches"));
  EXPECT_EQ(refusal({Kind::kZbV, 2, 4, 3}),
            "zb-v: each rank has exactly 2 stage(s) of the model, not 3");
  EXPECT_THAT(refusal({Kind::k1F1B, 2, 4, 2}), HasSubstr("exactly 1 stage(s) of the model, not 2"));
  EXPECT_THAT(refusal({Kind::kLoopedBfs, 2, 4, 0}), HasSubstr("at least 1 stage(s)"));
  EXPECT_THAT(refusal({.kind = Kind::kGPipe, .num_ranks = 0, .num_microbatches = 4}),
              HasSubstr("0 ranks and 4 microbatches"));
  EXPECT_THAT(refusal({.kind = Kind::kGPipe, .num_ranks = 4, .num_microbatches = -1}),
              HasSubstr("4 ranks and -1 microbatches"));
  EXPECT_THAT(refusal({.kind = Kind::kGPipe, .num_ranks = 60000, .num_microbatches = 60000}),
              HasSubstr("at most 65536 stages and 16777216 pairs"));
}

TEST(PipelineGenerateTest, BothNamesFindASchedule) {
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    EXPECT_EQ(find_pipeline_schedule(info.name), &info);
    EXPECT_EQ(&info_of(info.kind), &info);
    if (info.pytorch_name.empty()) continue;
    EXPECT_EQ(find_pipeline_schedule(info.pytorch_name), &info);
  }
  EXPECT_EQ(find_pipeline_schedule("ZB_V"), &info_of(Kind::kZbV));
  EXPECT_EQ(find_pipeline_schedule(""), nullptr);
  EXPECT_EQ(find_pipeline_schedule("2f2b"), nullptr);
}

}  // namespace
}  // namespace cadre
