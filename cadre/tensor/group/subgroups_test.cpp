// Tests groups that consist of some ranks of another group. Ranks are threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

TEST(ProcessGroup, SurvivorsRejoin) {
  const auto result = run_groups(3, [](const ProcessGroup& world) {
    world.barrier();
    if (world.rank() == 1) return;
    require(!failure_of([&] { world.barrier(); }).empty(), "rank 1 has left");
    const ProcessGroup next = world.rejoin({.timeout = testing::kRankTimeout});
    require(next.world_size() == 2 && next.rank() == (world.rank() == 2 ? 1 : 0), "in their order");
    const Tensor sum = torch::full({2}, world.rank());
    next.all_reduce(sum);
    require(torch::equal(sum, torch::full({2}, 2)), "0 + 2");
    next.close(testing::kRankTimeout);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The simulator has three ranks on the first host and one on the second.
TEST(ProcessGroup, KnowsOnWhichHostsItsRanksRun) {
  sim::Simulator simulator(1, {.ranks_per_host = {3, 1}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const sim::SimResult result = simulator.run([&](os::System& system, int rank) {
    at::set_num_threads(1);
    CommunicatorOptions options;
    options.listen_host = rank == 3 ? "10.0.0.2" : "10.0.0.1";
    const ProcessGroup world(Communicator::connect(
        system, {.rank = rank, .world_size = 4, .store = store, .job_token = "test"}, options,
        system.deadline_in(testing::kRankTimeout)));
    const auto place = [](const ProcessGroup& group) {
      return std::vector<int>{group.local_rank(), group.local_world_size(), group.node_rank(),
                              group.num_nodes()};
    };
    require(place(world) == (rank == 3 ? std::vector{0, 1, 1, 2} : std::vector{rank, 3, 0, 2}),
            "in the world");
    require(world.host() == system.host().name, world.host());
    // Ranks 3, 1 and 2 in this order: the second host comes first.
    if (const auto group = world.new_group({3, 1, 2})) {
      require(
          place(*group) == (rank == 3 ? std::vector{0, 1, 0, 2} : std::vector{rank - 1, 2, 1, 2}),
          "in a subgroup");
      group->close();
    }
    world.close();
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// Rank 1 is not a member and does not make the call.
TEST(ProcessGroup, IsMadeByItsMembersAlone) {
  const auto result = run_groups(3, [](const ProcessGroup& world) {
    const NewGroupOverStoreOptions options{
        .store = world.communicator().membership().store, .id = "pair", .name = "the pair"};
    if (world.rank() != 1) {
      const ProcessGroup pair = world.new_group_over_store({2, 0}, options);
      require(pair.rank() == (world.rank() == 2 ? 0 : 1) && pair.world_size() == 2, "its ranks");
      require(pair.name() == "the pair", pair.name());
      const Tensor sum = torch::full({1}, world.rank());
      pair.all_reduce(sum);
      require(sum.item<int>() == 2, "sum");
      pair.close();
    }
    require(world.communicator().num_collectives() == 0, "nothing of the world");
    const std::string failure = failure_of([&] {
      (void)world.new_group_over_store({(world.rank() + 1) % 3, (world.rank() + 2) % 3}, options);
    });
    require(failure.find("this rank is not in the list") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
