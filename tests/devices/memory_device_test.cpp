// Lets each allocation of one rank's device fail while wrappers are constructed. All ranks must
// throw the error of that rank, and the group must be usable afterwards.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre::memory_on_devices {
namespace {

namespace late = testing::late;
using testing::DeviceEngine;
using testing::failure_of;
using testing::require;
using testing::UnitNet;

constexpr int kNumRanks = 3;
constexpr int kPoorRank = 1;

class MemoryOfDevicesTest : public testing::OnDevices {
 protected:
  // begin: is called when allocations may fail from then on.
  using Construct = std::function<void(const ProcessGroup& group, const c10::Device& device,
                                       const std::function<void()>& begin)>;

  // Constructs a wrapper again and again, and lets the first, second, ... allocation fail until
  // none does.
  void expect_common_errors(const Construct& construct) {
    expect_on_all(kNumRanks, [&](const ProcessGroup& group, const c10::Device& device) {
      const bool is_poor = group.rank() == kPoorRank;
      uint64_t nth = 0;
      bool has_failed = true;
      while (has_failed) {
        ++nth;
        std::atomic<uint64_t> number = 0;
        const auto begin = [&] {
          if (!is_poor) return;
          late::fail_allocations(device.index(), [&](size_t) { return ++number == nth; });
        };
        const std::string failure = failure_of([&] { construct(group, device, begin); });
        late::fail_allocations(device.index(), nullptr);
        const torch::Tensor agreed = torch::full({1}, number >= nth ? 1 : 0, torch::kInt);
        group.all_reduce(agreed);
        has_failed = agreed.item<int>() == 1;
        require(has_failed == (failure.find("late:1 is out of memory") != std::string::npos),
                format("allocation {}: \"{}\"", nth, failure));
      }
      require(nth > 4, format("{} allocations", nth - 1));
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, MemoryOfDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(MemoryOfDevicesTest, DistributedDataParallelThrowsOnAllRanks) {
  for (const GradientPlacement placement :
       {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    expect_common_errors([&](const ProcessGroup& group, const c10::Device& device,
                             const std::function<void()>& begin) {
      const auto net = testing::net_on(device);
      begin();
      DistributedDataParallel<UnitNet> model(
          net, group, {.bucket_caps = {.first_bytes = 200, .bytes = 400}, .gradients = placement});
    });
  }
}

TEST_P(MemoryOfDevicesTest, FullyShardedDataParallelThrowsOnAllRanks) {
  for (const bool is_moved : {false, true}) {
    expect_common_errors([&](const ProcessGroup& group, const c10::Device& device,
                             const std::function<void()>& begin) {
      FullyShardedDataParallelOptions options{.device = device};
      options.wrap_policy = wrap_shard_units();
      const auto net = is_moved ? testing::net_on(device) : std::make_shared<UnitNet>();
      begin();
      FullyShardedDataParallel<UnitNet> model(net, group, options);
    });
  }
}

TEST_P(MemoryOfDevicesTest, ADeferredModelThrowsOnAllRanks) {
  expect_common_errors([&](const ProcessGroup& group, const c10::Device& device,
                           const std::function<void()>& begin) {
    FullyShardedDataParallelOptions options{.device = device};
    options.wrap_policy = wrap_shard_units();
    begin();
    FullyShardedDataParallel<UnitNet> model(defer_init([] { return std::make_shared<UnitNet>(); }),
                                            group, options);
  });
}

}  // namespace
}  // namespace cadre::memory_on_devices
