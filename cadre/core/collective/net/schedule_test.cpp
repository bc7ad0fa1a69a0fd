#include "cadre/core/collective/net/schedule.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace cadre {
namespace {

TEST(ScheduleTest, PartsCoverEveryElementOnce) {
  for (int world_size = 1; world_size <= 17; ++world_size) {
    for (const uint64_t count : {0, 1, 2, 7, 16, 17, 101}) {
      uint64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const Block part = part_of(count, world_size, rank);
        EXPECT_EQ(part.begin, next);
        EXPECT_LE(part.count, count / static_cast<uint64_t>(world_size) + 1);
        next += part.count;
      }
      EXPECT_EQ(next, count);
    }
  }
}

TEST(ScheduleTest, PrintsItself) {
  const Schedule schedule =
      make_schedule({.kind = OpKind::kAllReduce, .rank = 1, .world_size = 2, .count = 5});
  EXPECT_EQ(schedule.to_string(),
            "ring all_reduce, rank 1 of 2, 5 elements\n"
            "  0: send input[0, +3) to 0; recv from 0, output[3, +2) = received + input[3, +2), "
            "complete\n"
            "  1: send output[3, +2) to 0; recv from 0, output[0, +3) = received\n");
}

TEST(ScheduleTest, CountsWhatItSends) {
  // A ring of n = 4 ranks takes 2 (n - 1) steps, each of which sends 8 / n elements.
  const Schedule schedule =
      make_schedule({.kind = OpKind::kAllReduce, .rank = 3, .world_size = 4, .count = 8});
  EXPECT_EQ(schedule.steps.size(), 6U);
  EXPECT_EQ(schedule.num_reduce_steps, 3U);
  EXPECT_EQ(schedule.num_sent_elements(), 12U);
}

}  // namespace
}  // namespace cadre
