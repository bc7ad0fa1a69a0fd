// Optimizers, the loss scale, autocast and activation checkpoints on the late device, compared with
// the same calls on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre::optim_on_devices {
namespace {

namespace late = testing::late;
using testing::failure_of;
using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class OptimizersOnDeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { late::register_device(); }
  void SetUp() override {
    late::set_delays({.longest = std::chrono::microseconds(200), .seed = 1});
  }
  void TearDown() override {
    late::synchronize_all();
    late::set_delays({});
  }
  const c10::Device device_ = late::device(0);
};

// Parameters of three dtypes and of sizes that are no multiples of a vector; one has no elements.
std::vector<Tensor> parameters_on(const c10::Device& device, bool has_low_precision) {
  std::vector<Tensor> parameters;
  std::vector<torch::Dtype> dtypes = {torch::kFloat64, torch::kFloat32};
  if (has_low_precision) dtypes.push_back(torch::kBFloat16);
  double start = 0;
  for (const torch::Dtype dtype : dtypes) {
    for (const int64_t numel : {37, 3, 0, 64}) {
      const Tensor values = torch::sin(torch::arange(numel, torch::kFloat64) + ++start);
      parameters.push_back(values.to(dtype).to(device).requires_grad_());
    }
  }
  return parameters;
}

void set_gradients(const std::vector<Tensor>& parameters, int step) {
  double start = 0.3 * step;
  for (const Tensor& parameter : parameters) {
    const Tensor gradient =
        torch::cos(torch::arange(parameter.numel(), torch::kFloat64) * 0.7 + ++start);
    Tensor(parameter).mutable_grad() = gradient.to(parameter.scalar_type()).to(parameter.device());
  }
}

void expect_close(const std::vector<Tensor>& found, const std::vector<Tensor>& expected,
                  const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const double tolerance = expected[i].scalar_type() == torch::kFloat64   ? 1e-6
                             : expected[i].scalar_type() == torch::kFloat32 ? 1e-5
                                                                            : 2e-2;
    EXPECT_TRUE(torch::allclose(found[i].detach().cpu(), expected[i].detach(), tolerance, 1e-6))
        << what << ", parameter " << i;
  }
}

template <typename Optimizer, typename Options>
void expect_steps_of_the_cpu(const Options& options, const std::string& what,
                             bool has_low_precision = true) {
  const std::vector<Tensor> on_cpu = parameters_on(at::kCPU, has_low_precision);
  const std::vector<Tensor> on_device = parameters_on(late::device(0), has_low_precision);
  Optimizer truth(on_cpu, options);
  Optimizer optimizer(on_device, options);
  for (int step = 0; step < 4; ++step) {
    set_gradients(on_cpu, step);
    set_gradients(on_device, step);
    truth.step();
    const late::Counts before = late::counts(0);
    optimizer.step();
    EXPECT_EQ(testing::waits_since(before, 0), "") << what;
  }
  expect_close(on_device, on_cpu, what);

  // The state of the CPU continues on the device.
  std::stringstream file;
  torch::save(truth, file);
  Optimizer loaded(on_device, options);
  torch::load(loaded, file);
  set_gradients(on_cpu, 5);
  set_gradients(on_device, 5);
  truth.step();
  loaded.step();
  expect_close(on_device, on_cpu, what + ", loaded");
}

TEST_F(OptimizersOnDeviceTest, FusedStepsAreThoseOfTheCpu) {
  expect_steps_of_the_cpu<AdamW>(torch::optim::AdamWOptions(0.01).weight_decay(0.1), "AdamW");
  expect_steps_of_the_cpu<AdamW>(torch::optim::AdamWOptions(0.01).amsgrad(true), "amsgrad");
  expect_steps_of_the_cpu<Adam>(torch::optim::AdamOptions(0.01).weight_decay(0.1), "Adam");
  expect_steps_of_the_cpu<SGD>(torch::optim::SGDOptions(0.1), "SGD", false);
  expect_steps_of_the_cpu<SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1), "momentum",
      false);
  expect_steps_of_the_cpu<Adagrad>(torch::optim::AdagradOptions(0.1), "Adagrad");
  expect_steps_of_the_cpu<Adadelta>(AdadeltaOptions(0.5), "Adadelta");
}

// A kernel of a device takes tensors of one device.
TEST_F(OptimizersOnDeviceTest, ParametersOfSeveralDevicesAreStepped) {
  const std::vector<Tensor> truth = parameters_on(at::kCPU, false);
  std::vector<Tensor> mixed = parameters_on(at::kCPU, false);
  for (size_t i = 0; i < mixed.size(); ++i) {
    if (i % 3 == 0) continue;
    mixed[i] = mixed[i].detach().to(late::device(i % 3 == 1 ? 0 : 1)).requires_grad_();
  }
  AdamW of_truth(truth, torch::optim::AdamWOptions(0.01));
  AdamW optimizer(mixed, torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 3; ++step) {
    set_gradients(truth, step);
    set_gradients(mixed, step);
    const double norm = clip_grad_norm_(truth, 0.5);
    EXPECT_NEAR(clip_grad_norm_(mixed, 0.5), norm, 1e-6 * norm);
    of_truth.step();
    optimizer.step();
  }
  expect_close(mixed, truth, "mixed");
}

TEST_F(OptimizersOnDeviceTest, NormsOfAllKindsAreThoseOfTheCpu) {
  const std::vector<Tensor> truth = parameters_on(at::kCPU, true);
  const std::vector<Tensor> on_device = parameters_on(device_, true);
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    set_gradients(truth, 0);
    set_gradients(on_device, 0);
    const double norm = clip_grad_norm_(truth, 0.5, {.norm_type = p});
    const uint64_t before = late::counts(0).num_synchronous();
    EXPECT_NEAR(clip_grad_norm_(on_device, 0.5, {.norm_type = p}), norm, 1e-9 * norm) << p;
    EXPECT_EQ(late::counts(0).num_synchronous(), before + 1);
    for (size_t i = 0; i < truth.size(); ++i) {
      EXPECT_TRUE(torch::allclose(on_device[i].grad().cpu(), truth[i].grad(), 1e-6, 1e-9)) << i;
    }
  }
}

TEST_F(OptimizersOnDeviceTest, TheScalerFindsAnOverflowWithOneWait) {
  const std::vector<Tensor> on_device = parameters_on(device_, false);
  GradScaler scaler({.initial_scale = 8});
  for (const bool overflows : {false, true}) {
    set_gradients(on_device, 0);
    if (overflows) on_device.back().grad().mul_(kInfinity);
    const Tensor before = on_device.front().grad().clone();
    const uint64_t waits = late::counts(0).num_synchronous();
    EXPECT_EQ(scaler.unscale_(std::span<const Tensor>(on_device)), !overflows);
    EXPECT_EQ(late::counts(0).num_synchronous(), waits + 1);
    EXPECT_TRUE(torch::equal(on_device.front().grad().cpu() * 8, before.cpu()));
    scaler.update();
  }
  EXPECT_EQ(scaler.state().scale, 4);
  const std::vector<NamedTensor> named = {{"first", on_device[0]}, {"last", on_device.back()}};
  EXPECT_EQ(find_nonfinite_gradient(std::span<const NamedTensor>(named))->parameter, "last");
}

// The products run in the lower precision on the device and on the CPU, and parameters and
// gradients stay float32.
TEST_F(OptimizersOnDeviceTest, AutocastIsThatOfTheCpu) {
  const Tensor weight = torch::sin(torch::arange(24, torch::kFloat32)).view({4, 6});
  const Tensor x = torch::cos(torch::arange(18, torch::kFloat32)).view({3, 6});
  for (const torch::Dtype dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto run = [&](const c10::Device& device) {
      const Tensor own = weight.detach().clone().to(device).requires_grad_();
      Tensor product;
      {
        const Autocast autocast(dtype);
        product = torch::linear(x.to(device), own);
        const Autocast off(torch::kFloat32);
        EXPECT_EQ(torch::linear(x.to(device), own).scalar_type(), torch::kFloat32);
      }
      EXPECT_EQ(product.scalar_type(), dtype);
      EXPECT_EQ(torch::linear(x.to(device), own).scalar_type(), torch::kFloat32) << "outside";
      product.to(torch::kFloat32).square().sum().backward();
      return std::pair(product.detach().cpu(), own.grad().cpu());
    };
    const auto [product, gradient] = run(device_);
    const auto [expected_product, expected_gradient] = run(at::kCPU);
    EXPECT_TRUE(torch::allclose(product, expected_product, 1e-2, 1e-2));
    EXPECT_TRUE(torch::allclose(gradient, expected_gradient, 1e-2, 1e-2));
  }
}

// The second forward draws the numbers of the first one from the generator of the device, and
// leaves the generator as it was; autocast is that of the first forward.
TEST_F(OptimizersOnDeviceTest, ACheckpointDrawsTheSameNumbersAgain) {
  const Tensor x = torch::ones({40}).to(device_).requires_grad_();
  const Tensor weight = torch::ones({40, 40}).to(device_).requires_grad_();
  std::vector<torch::Dtype> dtypes;
  const auto dropped = [&](const std::vector<Tensor>& inputs) {
    const Tensor product = torch::linear(inputs[0], weight);
    dtypes.push_back(product.scalar_type());
    return std::vector<Tensor>{torch::dropout(inputs[0], 0.5, /*train=*/true) *
                               product.to(torch::kFloat32)};
  };
  Tensor output;
  {
    const Autocast autocast(torch::kBFloat16);
    output = checkpoint(dropped, {x})[0];
  }
  const Tensor between = torch::rand({5}, at::device(device_));
  at::Generator generator = at::globalContext().defaultGenerator(device_);
  const Tensor state = generator.get_state();
  output.sum().backward();
  EXPECT_TRUE(torch::equal(generator.get_state(), state)) << "the generator";
  ASSERT_EQ(dtypes.size(), 2);
  EXPECT_EQ(dtypes[0], torch::kBFloat16);
  EXPECT_EQ(dtypes[1], torch::kBFloat16);
  // The output is 40 * mask * 2, and so is the part of x's gradient that comes from the factor x.
  const Tensor mask = output.detach().cpu().ne(0);
  const Tensor through_product = weight.grad().cpu().sum(1).ne(0);
  EXPECT_TRUE(torch::equal(mask, through_product)) << "the mask of the second forward";
  EXPECT_GT(mask.sum().item<int64_t>(), 0);
  EXPECT_LT(mask.sum().item<int64_t>(), 40);
}

// The input is on the CPU, and only the parameters are on the device, to which the function moves
// the input.
TEST_F(OptimizersOnDeviceTest, ACheckpointThatMovesItsInputsDrawsTheSameNumbersAgain) {
  const c10::Device device = late::device(3);
  testing::late_runtime().make_current(device);
  const Tensor x = torch::ones({40}).requires_grad_();
  const Tensor weight = torch::ones({40}).to(device).requires_grad_();
  const auto dropped = [&](const std::vector<Tensor>& inputs) {
    return std::vector<Tensor>{
        torch::dropout(inputs[0].to(device) * weight, 0.5, /*train=*/true).cpu()};
  };
  const Tensor output = checkpoint(dropped, {x})[0];
  const Tensor between = torch::rand({5}, at::device(device));
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const Tensor state = generator.get_state();
  output.sum().backward();
  EXPECT_TRUE(torch::equal(generator.get_state(), state)) << "the generator";
  EXPECT_TRUE(torch::equal(x.grad(), output.detach())) << "the mask of the second forward";
  EXPECT_TRUE(torch::equal(weight.grad().cpu(), output.detach()));
  testing::late_runtime().make_current(device_);
}

// Mixed precision on another stream than that of the construction: what unscale_() and step() read
// is ordered behind the backward by that stream alone.
TEST_F(OptimizersOnDeviceTest, MixedPrecisionTrainsOnAnotherStream) {
  const auto train = [](const c10::Device& device, int64_t& num_waits) {
    const std::vector<Tensor> parameters = parameters_on(device, false);
    const Tensor weight =
        torch::sin(torch::arange(24, torch::kFloat32)).view({4, 6}).to(device).requires_grad_();
    std::vector<Tensor> trained = {weight, parameters[5]};
    AdamW optimizer(trained, torch::optim::AdamWOptions(0.01));
    GradScaler scaler({.initial_scale = 64, .growth_interval = 2});
    std::optional<testing::OtherStream> stream;
    if (!device.is_cpu()) stream.emplace(device);
    for (int step = 0; step < 5; ++step) {
      const Tensor x =
          torch::cos(torch::arange(18, torch::kFloat32) * (step + 1)).view({3, 6}).to(device);
      const uint64_t before = device.is_cpu() ? 0 : late::counts(device.index()).num_synchronous();
      Tensor loss;
      {
        const Autocast autocast(torch::kBFloat16);
        const Tensor product = torch::linear(x, weight);
        loss = product.to(torch::kFloat32).square().mean() + trained[1].square().sum();
      }
      // The third step overflows, so it is skipped.
      scaler.scale(step == 2 ? loss * kInfinity : loss).backward();
      scaler.unscale_(std::span<const Tensor>(trained));
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      if (!device.is_cpu()) num_waits += late::counts(device.index()).num_synchronous() - before;
    }
    EXPECT_EQ(scaler.state().scale, 128);
    return std::vector<Tensor>{weight.detach().cpu(), trained[1].detach().cpu()};
  };
  int64_t num_waits = 0;
  const std::vector<Tensor> expected = train(at::kCPU, num_waits);
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    late::set_delays({.longest = std::chrono::microseconds(300), .seed = seed});
    num_waits = 0;
    const std::vector<Tensor> found = train(device_, num_waits);
    EXPECT_EQ(num_waits, 5) << "one in each step, for the overflow";
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-3, 1e-3)) << i << ", seed " << seed;
    }
  }
}

TEST_F(OptimizersOnDeviceTest, StateInFilesIsRefused) {
  const std::vector<Tensor> on_device = parameters_on(device_, false);
  OffloadedOptimizer<SGD> optimizer(on_device, torch::optim::SGDOptions(0.1));
  set_gradients(on_device, 0);
  EXPECT_NE(failure_of([&] { optimizer.step(); }).find("are on the CPU"), std::string::npos);
}

}  // namespace
}  // namespace cadre::optim_on_devices
