// Tests that a wrapper and its mesh can be destroyed after a failed backward, and that the group of
// all ranks is usable afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

struct Chain : nn::Module {
  Chain() {
    for (int i = 0; i < 3; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::ones({40})));
    }
  }
  Tensor forward(Tensor x) {
    for (const Tensor& weight : weights) {
      x = x * weight;
      if (fails && &weight == &weights[1]) {
        x.register_hook([](const Tensor&) { throw std::runtime_error("user"); });
      }
    }
    return x;
  }
  std::vector<Tensor> weights;
  bool fails = false;
};

// Lets a backward of a wrapper on axis "b" of a mesh fail. The wrapper and the mesh are destroyed
// at the end of this scope.
void fail_in_scope(const ProcessGroup& world, GradientPlacement gradients, bool on_all) {
  const DeviceMesh mesh(world, {{"a", 2}, {"b", 2}});
  const ProcessGroup group = mesh.group("b");
  const auto module = std::make_shared<Chain>();
  DistributedDataParallel model{
      module,
      group,
      {.bucket_caps = {.first_bytes = 64, .bytes = 64}, .layout = {}, .gradients = gradients}};
  const auto step = [&] { model(torch::ones({2, 40})).sum().backward(); };
  for (int k = 0; k < 2; ++k) step();
  module->fails = on_all || group.rank() == 1;
  EXPECT_THAT(failure_of(step), HasSubstr(module->fails ? "user" : "kAborted"));
}

TEST(DdpEnds, AMeshEndsAfterAFailedStep) {
  for (const GradientPlacement gradients :
       {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    for (const bool on_all : {false, true}) {
      const auto result = run_groups(4, [&](const ProcessGroup& world) {
        fail_in_scope(world, gradients, on_all);
        world.barrier();
        const auto module = std::make_shared<Chain>();
        DistributedDataParallel model{module, world};
        model(torch::full({2, 40}, 1.0 + world.rank())).sum().backward();
        EXPECT_EQ(module->weights[0].grad()[3].item<float>(), 2 * 2.5);
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
}

}  // namespace
}  // namespace cadre
