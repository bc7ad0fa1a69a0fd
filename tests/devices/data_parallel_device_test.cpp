// Trains a module under DataParallel with replicas on several late devices, and compares losses,
// gradients and buffers with those of one process on the CPU. Delays of the kernels make a missing
// order of two streams a wrong number.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/data_parallel/data_parallel.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre {
namespace {

namespace late = testing::late;
namespace nn = torch::nn;
using torch::Tensor;

Tensor wave_of(int64_t rows, int64_t columns, double start) {
  return torch::sin(torch::arange(rows * columns, torch::kDouble) + start).view({rows, columns});
}

struct ReplicatedNetImpl : nn::Cloneable<ReplicatedNetImpl> {
  ReplicatedNetImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(5, 8));
    second = register_module("second", nn::Linear(8, 3));
    to(torch::kDouble);
    count = register_buffer("count", torch::zeros({1}, torch::kDouble));
    const torch::NoGradGuard no_grad;
    double start = 0;
    for (Tensor& parameter : parameters()) {
      parameter.copy_(wave_of(1, parameter.numel(), ++start).view_as(parameter));
    }
  }
  Tensor forward(const Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      count.add_(x.size(0));
    }
    return second(torch::tanh(first(x)));
  }
  nn::Linear first{nullptr}, second{nullptr};
  Tensor count;
};
TORCH_MODULE(ReplicatedNet);

class DataParallelOnDevices : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    late::register_device();
    late::set_delays({.longest = std::chrono::microseconds(300), .seed = 1});
  }
  void TearDown() override {
    late::synchronize_all();
    late::set_delays({});
  }
};

void expect_close_to(const Tensor& found, const Tensor& expected, const std::string& what) {
  EXPECT_LE((found.detach().cpu() - expected.detach()).abs().max().item<double>(), 1e-12) << what;
}

TEST_P(DataParallelOnDevices, TrainsAsOneProcess) {
  std::vector<c10::Device> devices;
  for (int i = 0; i < GetParam(); ++i) devices.push_back(late::device(i));
  ReplicatedNet alone;
  ReplicatedNet net;
  net->to(devices[0]);
  DataParallel model{net, {.devices = devices}};
  torch::optim::SGD of_alone(alone->parameters(), 0.1);
  torch::optim::SGD of_model(model.parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const int64_t num_rows = 7 - step;
    const Tensor x = wave_of(num_rows, 5, step);
    of_alone.zero_grad();
    of_model.zero_grad();
    const Tensor expected = alone(x).square().mean();
    const Tensor output = model(x.to(devices[0]));
    EXPECT_EQ(output.device(), devices[0]);
    const Tensor loss = output.square().mean();
    expected.backward();
    loss.backward();
    expect_close_to(loss, expected, "loss");
    for (const auto& item : alone->named_parameters()) {
      expect_close_to(net->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
    }
    of_alone.step();
    of_model.step();
  }
  double rows_of_first = 0;
  for (int64_t num_rows = 7; num_rows > 4; --num_rows) {
    rows_of_first += static_cast<double>((num_rows + GetParam() - 1) / GetParam());
  }
  EXPECT_EQ(net->count.cpu().item<double>(), rows_of_first);
}

TEST_P(DataParallelOnDevices, TheStreamsOfTheCallerAreUsed) {
  std::vector<c10::Device> devices;
  for (int i = 0; i < GetParam(); ++i) devices.push_back(late::device(i));
  ReplicatedNet alone;
  ReplicatedNet net;
  net->to(devices[0]);
  late::synchronize_all();
  DataParallel model{net, {.devices = devices}};
  const auto runtime = device::find_devices(devices[0].type()).runtime;
  std::vector<c10::Stream> streams;
  for (const c10::Device& device : devices) {
    streams.push_back(runtime->pooled_stream(device, device::StreamPriority::kNormal));
  }
  const c10::MultiStreamGuard guard(streams);
  for (int i = 0; i < 5; ++i) {
    const Tensor x = wave_of(6, 5, i);
    expect_close_to(model(x.to(devices[0])), alone(x), format("forward {}", i));
  }
}

TEST_P(DataParallelOnDevices, AModuleOnAnotherDeviceIsRefused) {
  ReplicatedNet net;
  DataParallel model{net, {.devices = {late::device(0), late::device(1)}}};
  try {
    model(wave_of(6, 5, 0));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.message()).find("parameter first.weight is on cpu and the first"),
              std::string::npos)
        << error.message();
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DataParallelOnDevices, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace cadre
