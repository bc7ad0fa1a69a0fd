// Tests that wrappers and their meshes can be destroyed after a failed step: no operation of their
// groups stays pending, and the group of all ranks is still usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/torch/fsdp_stack.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

struct End {
  int replicate;
  int shard;
  bool fails_everywhere;  // false: the step fails on rank 1 only
  bool in_forward;        // false: the step fails in the backward
  Reshard reshard = Reshard::kAfterForward;
};

void train(FullyShardedDataParallel<Stack>& model, const ProcessGroup& group) {
  model.zero_grad();
  model(stack_rows(group.rank())).sum().backward();
}

// Trains three steps, lets the fourth one fail, and destroys the wrapper, its optimizer and its
// mesh at the end of this scope.
void fail_in_scope(const End& end, const ProcessGroup& group) {
  const DeviceMesh mesh(group, {{"replicate", end.replicate}, {"shard", end.shard}});
  const auto net = std::make_shared<Stack>();
  FullyShardedDataParallelOptions options = units_of_stack();
  options.reshard = end.reshard;
  FullyShardedDataParallel model{net, mesh, options};
  ShardedOptimizer<torch::optim::SGD> sgd{model, torch::optim::SGDOptions(0.1)};
  for (int k = 0; k < 3; ++k) {
    train(model, group);
    sgd.step();
  }
  const bool fails = end.fails_everywhere || group.rank() == 1;
  if (fails && end.in_forward) net->in_forward = [] { throw std::runtime_error("user"); };
  if (fails && !end.in_forward) net->in_backward = [] { throw std::runtime_error("user"); };
  EXPECT_THAT(failure_of([&] { train(model, group); }), HasSubstr(fails ? "user" : "kAborted"));
}

void expect_world_goes_on(const ProcessGroup& group) {
  group.barrier();
  FullyShardedDataParallel model{std::make_shared<Stack>(), group, units_of_stack()};
  train(model, group);
  Stack plain;
  const int world_size = group.world_size();
  for (int rank = 0; rank < world_size; ++rank) {
    (plain.forward(stack_rows(rank)).sum() / world_size).backward();
  }
  const Snapshot gradients = assembled_gradients(model, group);
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(torch::allclose(gradients[i], plain.parameters()[i].grad(), 1e-12, 1e-14)) << i;
  }
}

TEST(FsdpEnds, AMeshEndsAfterAFailedStep) {
  const std::vector<End> ends = {
      {.replicate = 2, .shard = 2, .fails_everywhere = false, .in_forward = false},
      {.replicate = 2, .shard = 2, .fails_everywhere = true, .in_forward = false},
      {.replicate = 2, .shard = 2, .fails_everywhere = true, .in_forward = true},
      {.replicate = 2,
       .shard = 2,
       .fails_everywhere = false,
       .in_forward = false,
       .reshard = Reshard::kAfterReduction},
      {.replicate = 2, .shard = 1, .fails_everywhere = false, .in_forward = false},
      {.replicate = 1, .shard = 2, .fails_everywhere = false, .in_forward = false}};
  for (const End& end : ends) {
    const auto result = run_groups(end.replicate * end.shard, [&](const ProcessGroup& group) {
      fail_in_scope(end, group);
      expect_world_goes_on(group);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

}  // namespace
}  // namespace cadre
