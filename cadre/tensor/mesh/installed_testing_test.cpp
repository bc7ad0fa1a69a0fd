// Tests the headers that Cadre installs for the tests of its users: ranks as threads, ranks in the
// simulator, and a mesh over a group of which only this rank exists.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/fake_process_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using testing::run_groups_in_simulator;
using torch::Tensor;

void average(const ProcessGroup& group, std::string& output) {
  const Tensor tensor = torch::full({3}, group.rank() + 1.0);
  for (int i = 0; i < 5; ++i) {
    group.all_reduce(tensor, {.op = ReduceOp::kAvg});
    require(tensor[2].item<double>() == 1.5, "the average over both ranks");
  }
  output = std::to_string(group.rank());
}

TEST(InstalledTesting, GroupsOfThreadsReturnOutputs) {
  const auto result = run_groups(2, average);
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[1].output, "1");
}

TEST(InstalledTesting, GroupsHaveTheOptions) {
  const auto result =
      run_groups(2,
                 [](const ProcessGroup& group) {
                   const CommunicatorOptions& options = group.communicator().options();
                   require(options.timeout == std::chrono::seconds(7), "the timeout of operations");
                   require(group.communicator().backend_name() == "net", "the transport");
                 },
                 {.timeout = std::chrono::seconds(7), .transport = TransportChoice::kTcp});
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(InstalledTesting, GroupsInTheSimulatorRepeatBySeedAndNameAKilledRank) {
  const auto whole = run_groups_in_simulator(7, {.ranks_per_host = {1, 1}}, 2, average);
  EXPECT_TRUE(whole.ok()) << whole.failures();
  EXPECT_EQ(whole.ranks[1].output, "1");
  const auto again = run_groups_in_simulator(7, {.ranks_per_host = {1, 1}}, 2, average);
  EXPECT_EQ(again.sim.history_hash, whole.sim.history_hash);
  const auto kill =
      sim::Fault::kill(1, sim::When::at_point(1, whole.sim.ranks[1].num_points * 3 / 4));
  const auto killed =
      run_groups_in_simulator(7, {.ranks_per_host = {1, 1}, .faults = {kill}}, 2, average);
  EXPECT_EQ(killed.ranks[1].failure, "killed");
  EXPECT_THAT(killed.ranks[0].failure, HasSubstr("rank 1"));
}

TEST(InstalledTesting, ABodyWithoutOutputRunsInTheSimulator) {
  int num_ran = 0;  // the simulator runs one rank at a time
  const auto result =
      run_groups_in_simulator(7, {.ranks_per_host = {1, 1}}, 2, [&](const ProcessGroup& group) {
        const Tensor tensor = torch::full({2}, group.rank() + 1.0);
        group.all_reduce(tensor);
        require(tensor[1].item<double>() == 3, "the sum over both ranks");
        ++num_ran;
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(num_ran, 2);
}

TEST(InstalledTesting, AMeshOnAFakeGroupHasTheSizesOfItsAxes) {
  const ProcessGroup world = testing::make_fake_group(1024, {.rank = 7});
  const DeviceMesh mesh(world, {{"data", 128}, {"model", 8}});
  const ProcessGroup& model = mesh.group("model");
  const ProcessGroup& data = mesh.group("data");
  EXPECT_THAT(model.global_ranks(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_EQ(model.rank(), 7);
  EXPECT_EQ(data.world_size(), 128);
  EXPECT_EQ(data.global_ranks()[1], 15);
  const Tensor all = torch::zeros({8, 2});
  model.all_gather(all, torch::tensor({1.0f, 2.0f}));
  EXPECT_EQ(all.sum().item<double>(), 24);
  const Tensor part = torch::zeros({2});
  data.reduce_scatter(part, torch::arange(256, torch::kFloat));
  EXPECT_TRUE(torch::equal(part, torch::tensor({0.0f, 1.0f})));
}

TEST(InstalledTesting, AFakeGroupOutlivesItsHandles) {
  const auto subgroup = testing::make_fake_group(4, {.rank = 2}).new_group({3, 2});
  const Tensor tensor = torch::ones({2});
  subgroup->all_reduce(tensor);
  EXPECT_EQ(subgroup->rank(), 1);
  EXPECT_EQ(tensor.sum().item<double>(), 2);
}

}  // namespace
}  // namespace cadre
