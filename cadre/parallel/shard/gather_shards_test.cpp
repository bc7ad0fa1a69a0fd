// Tests that whole tensors are gathered from the shards of all ranks. Ranks are threads.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <vector>

#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shards_of_ones.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {
namespace {

// Only some ranks have a gradient. The others must take part in the gather with zeros.
TEST_P(GradientToolsOnRanks, GatherGradientsThatSomeRanksHave) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8, 4});
    if (group.rank() > 0) shards[0].values.mutable_grad().reset();
    shards[1].values.mutable_grad().reset();
    const std::vector<NamedTensor> gradients = shard::gather_gradients(shards, group);
    Tensor expected = torch::zeros({8});
    expected.narrow(0, 0, (8 + group.world_size() - 1) / group.world_size()).fill_(1);
    EXPECT_TRUE(torch::equal(gradients[0].tensor, expected)) << gradients[0].tensor;
    EXPECT_FALSE(gradients[1].tensor.defined());
  });
}

}  // namespace
}  // namespace cadre::testing
