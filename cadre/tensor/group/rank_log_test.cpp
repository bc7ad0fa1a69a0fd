// Tests that exactly the chosen ranks write, and that each line of a message reaches the log's sink
// with the rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cadre/tensor/group/rank_log.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using testing::require;
using testing::run_groups;

TEST(RankLog, WritesFromTheRanksThatWereChosenLineByLine) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto result =
      run_groups(3,
                 [&](const ProcessGroup& group, std::string&) {
                   const RankLog of_main(group, {.component = "train"});
                   of_main.warning("loss 0.5\nnorm 2");
                   require(of_main.is_writing() == (group.rank() == 0), "who writes");
                   group.barrier();
                   RankLog(group, {.ranks = LoggingRanks::kMainOfEachNode}).warning("slow disk");
                   group.barrier();
                   RankLog(group, {.ranks = LoggingRanks::kAll}).error("bad sample");
                 },
                 {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(log->get(),
              ElementsAre("train loss 0.5", "train norm 2", "program slow disk",
                          "program bad sample", "program bad sample", "program bad sample"));
}

}  // namespace
}  // namespace cadre
