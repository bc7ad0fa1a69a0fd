// Tests meshes and distributed tensors on the late device: every redistribution, forward and
// backward, gives what the same program gives on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/dtensor.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;
using testing::DeviceEngine;
using testing::failure_of;
using testing::require;
using torch::Tensor;
using Placements = std::vector<Placement>;

class DTensorOnDevicesTest : public testing::OnDevices {};

INSTANTIATE_TEST_SUITE_P(Devices, DTensorOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

std::vector<Placements> some_placements() {
  const std::vector<Placement> each = {Replicate(), Shard(0), Shard(1), Partial()};
  std::vector<Placements> all;
  for (const Placement& first : each) {
    for (const Placement& second : each) all.push_back({first, second});
  }
  return all;
}

// Redistributes on `device`, and returns the part, the whole tensor and the gradient.
std::vector<Tensor> redistributed(const DeviceMesh& mesh, const c10::Device& device,
                                  const Placements& from, const Placements& to) {
  const Tensor full = torch::sin(torch::arange(35, torch::kDouble)).view({7, 5});
  const DTensor given = DTensor::distribute(full.to(device).requires_grad_(), mesh, from);
  const DTensor moved = given.redistribute(to);
  require(moved.local().device() == device, "the device of the result");
  const Tensor weight = torch::cos(torch::arange(35, torch::kDouble)).view({7, 5}).to(device);
  (moved.full_tensor() * weight).sum().backward();
  return {moved.local().detach().cpu(), moved.full_tensor().detach().cpu(),
          given.local().grad().cpu()};
}

TEST_P(DTensorOnDevicesTest, EveryRedistributionIsThatOfTheCpu) {
  std::vector<std::pair<Placements, Placements>> all;
  for (const Placements& from : some_placements()) {
    for (const Placements& to : some_placements()) all.emplace_back(from, to);
  }
  for (const uint64_t seed : {0, 1}) {
    late::set_delays({.longest = microseconds(seed == 0 ? 0 : 100), .seed = seed});
    const auto some = share_on_engine(all, seed);
    expect_on_all(4, [&](const ProcessGroup& group, const c10::Device& device) {
      const DeviceMesh mesh(group, {{"a", 2}, {"b", 2}});
      for (const auto& [from, to] : some) {
        const auto expected = redistributed(mesh, c10::Device(at::kCPU), from, to);
        const auto found = redistributed(mesh, device, from, to);
        for (size_t i = 0; i < found.size(); ++i) {
          require(torch::allclose(found[i], expected[i], 1e-13, 1e-14),
                  format("{} to {}, result {}", to_string(from), to_string(to), i));
        }
      }
      mesh.close();
    });
  }
}

TEST_P(DTensorOnDevicesTest, EveryGroupOfAMeshHasTheDevice) {
  expect_on_all(3, [](const ProcessGroup& group, const c10::Device& device) {
    const DeviceMesh mesh(group, {{"a", 3}, {"b", 1}});
    for (const char* axis : {"a", "b"}) {
      require(mesh.group(axis).device() == device, format("the device along {}", axis));
    }
    require(mesh.joint_group().device() == device, "the device of all");
    mesh.close();
  });
}

TEST_P(DTensorOnDevicesTest, TensorsElsewhereAreRefusedOnAllRanks) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const DeviceMesh mesh(group, {{"a", 2}});
    const c10::Device elsewhere = late::device(6);
    const auto expect = [&](const c10::Device& own, const std::string& text) {
      const std::string failure = failure_of(
          [&] { DTensor::distribute(torch::ones({4}, at::device(own)), mesh, {Shard(0)}); });
      testing::require_refusal(failure, text);
    };
    expect(group.rank() == 1 ? elsewhere : device, "is on " + elsewhere.str());
    expect(group.rank() == 1 ? c10::Device(at::kCPU) : device, "the type of the device");
    mesh.close();
  });
}

}  // namespace
}  // namespace cadre
