// Loads batches in pinned memory and copies them to the late device, while the device is far behind
// the host. The truth is the same loader without pinned memory, on the CPU.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <vector>

#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/train/data/data_loader.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using testing::DeviceEngine;
using testing::require;
using torch::Tensor;

// Samples with distinct values; an epoch of batches of 4 samples ends with a short one.
class Squares final : public Dataset {
 public:
  int64_t size() const override { return 150; }
  Batch get(std::span<const int64_t> indices) const override {
    const Tensor index = torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    return {.data = index.to(torch::kDouble).square().unsqueeze(1).expand({-1, 300}),
            .target = index};
  }
};

DataLoader make_loader(int num_threads, bool is_pinned) {
  return make_data_loader(
      Squares(), {.batch_size = 4, .seed = 3, .num_threads = num_threads, .pin_memory = is_pinned});
}

class LoaderOnDevicesTest : public testing::OnDevices {};
INSTANTIATE_TEST_SUITE_P(Devices, LoaderOnDevicesTest, ::testing::Values(DeviceEngine::kStaged));

// The host goes through the whole epoch, and frees each batch, before the first copy runs.
TEST_P(LoaderOnDevicesTest, ABatchIsCopiedWithoutAWaitAndNotOverwrittenBefore) {
  std::vector<Batch> expected;
  DataLoader plain = make_loader(0, false);
  for (const Batch& batch : plain.epoch(0)) expected.push_back(batch);
  const c10::Device device = late::device();
  testing::late_runtime().make_current(device);
  for (const int num_threads : {0, 3}) {
    const c10::Stream stream = pooled(device);
    const c10::StreamGuard guard(stream);
    DataLoader loader = make_loader(num_threads, true);
    late::StreamHold hold(stream);
    const late::Counts before = late::counts(device.index());
    std::vector<Batch> copies;
    for (const Batch& batch : loader.epoch(0)) {
      EXPECT_TRUE(batch.data.is_pinned());
      EXPECT_TRUE(batch.target.is_pinned());
      copies.push_back({.data = batch.data.to(device, /*non_blocking=*/true),
                        .target = batch.target.to(device, /*non_blocking=*/true)});
    }
    const late::Counts after = late::counts(device.index());
    EXPECT_EQ(after.num_synchronous(), before.num_synchronous());
    EXPECT_EQ(after.waits, before.waits);
    hold.release();
    ASSERT_EQ(copies.size(), expected.size());
    for (size_t i = 0; i < copies.size(); ++i) {
      EXPECT_TRUE(copies[i].data.cpu().equal(expected[i].data)) << i;
      EXPECT_TRUE(copies[i].target.cpu().equal(expected[i].target)) << i;
    }
  }
}

// Rank 1 has no sample in the last batch. Its device is not that of rank 0.
TEST_P(LoaderOnDevicesTest, RanksMayPinOrNot) {
  late::set_delays({.longest = std::chrono::microseconds(300), .seed = 4});
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    DataLoader loader = make_data_loader(Squares(), {.batch_size = 149,
                                                     .ranks = group,
                                                     .num_threads = group.rank(),
                                                     .pin_memory = group.rank() == 1});
    Tensor sum = torch::zeros({}, at::device(device).dtype(torch::kDouble));
    for (const Batch& batch : loader.epoch(0)) {
      require(batch.data.is_pinned() == (group.rank() == 1 && batch.data.numel() > 0), "pinned");
      sum += batch.data.to(device, true).select(1, 0).sum();
    }
    group.all_reduce(sum);
    require(sum.item<double>() == 149.0 * 150 * 299 / 6, "the sum of all squares");
  });
}

}  // namespace
}  // namespace cadre
