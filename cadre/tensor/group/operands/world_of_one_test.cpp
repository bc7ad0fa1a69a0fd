#include "cadre/tensor/group/operands/world_of_one.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;

TEST(WorldOfOne, AGroupOfSeveralRanksRefusesCallsInTheScope) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto refusal = [&] { return failure_of([&] { group.barrier(); }); };
    const auto is_refused_with = [&](const std::string& remedy) {
      return refusal().find("a world of one process: " + remedy) != std::string::npos;
    };
    {
      const WorldOfOneScope outer("the outer remedy");
      require(is_refused_with("the outer remedy"), refusal());
      {
        const WorldOfOneScope inner("the inner remedy");
        require(is_refused_with("the inner remedy"), refusal());
      }
      require(is_refused_with("the outer remedy"), "after the inner scope");
      require(failure_of([&] { (void)group.world_size(); }).starts_with("kInvalidArgument: "),
              "world_size()");
      std::string elsewhere = "not called";
      std::thread([&] { elsewhere = failure_of([&] { (void)group.world_size(); }); }).join();
      require(elsewhere.empty(), "the scope is one of its thread: " + elsewhere);
    }
    require(refusal().empty(), "after the scope");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(WorldOfOne, AGroupOfOneRankWorksInTheScope) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const WorldOfOneScope scope("none");
    group.barrier();
    require(group.world_size() == 1, "world_size()");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
