// Tests init_process_group() with and without a launcher.
#include "cadre/tensor/group/process_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using torch::Tensor;

TEST(ProcessGroup, WithoutALauncherTheWorldIsThisProcess) {
  const ProcessGroup world = init_process_group();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.world_size(), 1);
  const Tensor tensor = torch::full({3}, 4.0);
  world.all_reduce(tensor, {.op = ReduceOp::kAvg});
  EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 4.0)));
  world.close();
}

// Two threads are the ranks of a job that no launcher started.
TEST(ProcessGroup, IsMadeOfWhatTheProgramSaysWithoutALauncher) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    const ProcessGroup world = init_process_group({.rank = context.rank,
                                                   .world_size = 2,
                                                   .init_method = "file://" + folder.file("job"),
                                                   .backend = "net",
                                                   .timeout = testing::kRankTimeout});
    require(world.communicator().backend_name() == "net", "the engine");
    const Tensor sum = torch::full({1}, world.rank() + 1);
    world.all_reduce(sum);
    require(sum.item<int>() == 3, "the sum");
    world.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(failure_of([] { (void)init_process_group({.backend = "nccl"}); }),
              ::testing::HasSubstr("InitOptions::backend is \"nccl\"; pass \"host\" or \"net\""));
}

}  // namespace
}  // namespace cadre
