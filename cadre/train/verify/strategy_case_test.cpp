// Tests which cases of a verification exist for a number of ranks.
#include "cadre/train/verify/strategy_case.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;

// Tests the list of cases with all kinds of names, and with two meshes of two axes.
TEST(StrategyCases, AreAllThatApply) {
  const auto names = [](const StrategySpace& space) {
    std::vector<std::string> all;
    for (const StrategyCase& strategy : all_strategy_cases(space)) {
      all.push_back(name_of(strategy, space.world_size));
    }
    return all;
  };
  EXPECT_THAT(
      names({.world_size = 8, .num_parts = 1, .has_group_reshard = true}),
      ElementsAre("ddp", "zero1", "zero2", "fsdp/after_forward", "fsdp/after_backward",
                  "fsdp/after_reduction", "fsdp/onto_group", "fsdp/after_forward/mapped",
                  "hsdp-2x4/after_forward", "hsdp-2x4/after_backward", "hsdp-2x4/after_reduction",
                  "hsdp-2x4/onto_group", "hsdp-2x4/after_forward/mapped", "hsdp-4x2/after_forward",
                  "hsdp-4x2/after_backward", "hsdp-4x2/after_reduction",
                  "hsdp-4x2/after_forward/mapped"));
  EXPECT_THAT(names({.world_size = 1, .num_parts = 2, .has_group_reshard = false}),
              ElementsAre("ddp", "ddp/accumulate", "zero1", "zero1/accumulate", "zero2",
                          "zero2/accumulate", "fsdp/after_forward", "fsdp/after_forward/accumulate",
                          "fsdp/after_backward", "fsdp/after_backward/accumulate",
                          "fsdp/after_reduction", "fsdp/after_reduction/accumulate",
                          "fsdp/after_forward/mapped", "fsdp/after_forward/mapped/accumulate"));
}

}  // namespace
}  // namespace cadre
