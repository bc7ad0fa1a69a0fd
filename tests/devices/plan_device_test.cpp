// Compares plans with the memory that the wrappers use on devices: the most that tensors of each
// rank's device use in a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/testing/torch/plan_wrappers.h"
#include "tests/devices/on_devices.h"

namespace cadre {
namespace {

using testing::late_runtime;

constexpr int kNumPlannedSteps = 3;
// An upper bound for the activations of two samples, the temporary memory of an operation, and the
// rounding of each tensor up to a block.
constexpr int64_t kFewBytes = 96 * 1024;

class PlanOnDevicesTest : public testing::OnDevices {
 protected:
  // Trains a model as `options` say, on each rank's device, and compares the last step with the
  // plan.
  void expect_plan(int num_ranks, PlanOptions options) {
    expect_on_all(num_ranks, [&](const ProcessGroup& world, const c10::Device& device) {
      PlanOptions own = options;
      own.num_ranks = own.ranks_per_host = num_ranks;
      own.rank = world.rank();
      own.is_on_device = true;
      testing::cap_buckets(own);
      const size_t before = late_runtime().memory(device).allocated_bytes;
      const auto net = std::make_shared<testing::PlannedNet>();
      net->to(device);
      const MemoryPlan plan = plan_memory(model_sizes_of(net, testing::planned_units()), own);
      const at::Tensor x = torch::randn({2, testing::kPlannedWidth}).to(device);
      testing::with_planned_wrappers(
          net, testing::planned_units(), world, own,
          [&](auto& model, auto& optimizer, const auto& /*groups*/) {
            for (int step = 0; step < kNumPlannedSteps; ++step) {
              if (step + 1 == kNumPlannedSteps) late_runtime().reset_peaks(device);
              testing::accumulate_gradients(model, optimizer, x, own.accumulate);
              optimizer.step();
            }
            const auto peak =
                static_cast<int64_t>(late_runtime().memory(device).peak_allocated_bytes - before);
            EXPECT_EQ(plan.shared_bytes, 0);
            EXPECT_NEAR(static_cast<double>(peak), static_cast<double>(plan.held.total()),
                        kFewBytes)
                << to_string(own.strategy) << ", rank " << world.rank();
          });
    });
  }
};

TEST_P(PlanOnDevicesTest, OfReplicasIsWhatTensorsUse) {
  expect_plan(2, {.strategy = DataStrategy::kDdp});
  expect_plan(3, {.strategy = DataStrategy::kDdp, .accumulate = 2});
  expect_plan(3, {.strategy = DataStrategy::kZero1});
  expect_plan(2, {.strategy = DataStrategy::kZero2, .accumulate = 3});
}

TEST_P(PlanOnDevicesTest, OfShardsIsWhatTensorsUse) {
  expect_plan(3, {.strategy = DataStrategy::kFsdp});
  expect_plan(2, {.strategy = DataStrategy::kFsdp, .accumulate = 2, .num_prefetched = 0});
  expect_plan(2, {.strategy = DataStrategy::kFsdp, .reshard = Reshard::kAfterBackward});
  expect_plan(2, {.strategy = DataStrategy::kFsdp,
                  .parameter_dtype = DType::kBfloat16,
                  .reduce_dtype = DType::kFloat32});
  expect_plan(4, {.strategy = DataStrategy::kHsdp, .num_replicas = 2});
}

INSTANTIATE_TEST_SUITE_P(Engines, PlanOnDevicesTest,
                         ::testing::Values(testing::DeviceEngine::kEnqueues,
                                           testing::DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

}  // namespace
}  // namespace cadre
