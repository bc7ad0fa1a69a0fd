#include "cadre/parallel/data_parallel/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/data_parallel/parallel_apply.h"
#include "cadre/parallel/data_parallel/replicate.h"
#include "cadre/parallel/data_parallel/scatter_gather.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/testing/core/leftovers.h"

namespace cadre {
namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(3, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(8, 2).bias(false)));
    dropout = register_module("dropout", torch::nn::Dropout(p));
  }
  at::Tensor forward(const at::Tensor& x, double factor = 1) {
    return last(dropout(torch::tanh(second(torch::tanh(first(x)) * factor))));
  }
  static constexpr double p = 0;
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Net);

Net make_net(at::ScalarType dtype = torch::kDouble) {
  torch::manual_seed(3);
  Net net;
  net->to(dtype);
  return net;
}

at::Tensor rows(int64_t count, int64_t width, double offset) {
  return torch::sin(torch::arange(count * width, torch::kDouble) * 0.7 + offset)
      .view({count, width});
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
    return "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

// Trains for some steps with replicas and without, and compares losses, gradients and weights.
void expect_equal_training(int num_replicas, int64_t num_rows, at::ScalarType dtype, double bound) {
  SCOPED_TRACE(format("{} replicas, {} rows", num_replicas, num_rows));
  Net alone = make_net(dtype);
  Net net = make_net(dtype);
  DataParallel model{net, {.num_replicas = num_replicas}};
  torch::optim::SGD of_alone(alone->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  torch::optim::SGD of_model(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    const at::Tensor x = rows(num_rows, 3, step).to(dtype).requires_grad_(true);
    const at::Tensor y = rows(num_rows, 2, step + 0.5).to(dtype);
    const at::Tensor x_of_model = x.detach().clone().requires_grad_(true);
    of_alone.zero_grad();
    of_model.zero_grad();
    const at::Tensor expected = torch::mse_loss(alone(x, 1.5), y);
    const at::Tensor loss = torch::mse_loss(model(x_of_model, 1.5), y);
    expected.backward();
    loss.backward();
    EXPECT_LE(largest_difference(loss, expected), bound);
    EXPECT_LE(largest_difference(x_of_model.grad(), x.grad()), bound);
    for (const auto& item : alone->named_parameters()) {
      EXPECT_LE(largest_difference(net->named_parameters()[item.key()].grad(), item.value().grad()),
                bound)
          << item.key();
    }
    of_alone.step();
    of_model.step();
  }
}

TEST(DataParallel, TrainsAsOneProcess) {
  for (const int num_replicas : {1, 2, 3, 5}) {
    for (const int64_t num_rows : {12, 7, 4, 1}) {
      expect_equal_training(num_replicas, num_rows, torch::kDouble, 1e-12);
      expect_equal_training(num_replicas, num_rows, torch::kFloat, 1e-6);
    }
  }
}

TEST(DataParallel, GradientsAddUpOverForwardsAndFollowTheModule) {
  Net alone = make_net();
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 3}};
  const auto both = [&](const std::function<void(Net&)>& change) {
    change(alone);
    change(net);
  };
  const auto compare = [&] {
    const at::Tensor a = rows(5, 3, 1);
    const at::Tensor b = rows(8, 3, 2);
    // Two forwards before their backwards, the later one first.
    const at::Tensor expected_a = alone(a).square().sum();
    const at::Tensor expected_b = alone(b).sin().sum();
    const at::Tensor of_a = model(a).square().sum();
    const at::Tensor of_b = model(b).sin().sum();
    expected_b.backward();
    expected_a.backward();
    of_b.backward();
    of_a.backward();
    for (const auto& item : alone->named_parameters()) {
      const at::Tensor gradient = net->named_parameters()[item.key()].grad();
      ASSERT_EQ(gradient.defined(), item.value().grad().defined()) << item.key();
      if (gradient.defined()) EXPECT_LE(largest_difference(gradient, item.value().grad()), 1e-12);
    }
  };
  compare();
  compare();  // adds to the gradients
  both([](Net& m) {
    m->zero_grad();
    m->second->weight.set_requires_grad(false);      // frozen later
    m->first->weight.set_data(rows(8, 3, 9));        // replaced behind the wrapper
    m->last->weight.mutable_grad() = rows(2, 8, 4);  // assigned by hand
  });
  compare();
  EXPECT_FALSE(net->second->weight.grad().defined());
  EXPECT_TRUE(net->first->weight.is_leaf());
}

TEST(DataParallel, AChangedWeightBetweenForwardAndBackwardIsAnError) {
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 2}};
  const at::Tensor loss = model(rows(4, 3, 0)).sum();
  {
    const torch::NoGradGuard no_grad;
    net->second->weight.mul_(2);
  }
  EXPECT_THROW(loss.backward(), c10::Error);
  // A replica alone is checked as well, without the module's own graph.
  const std::vector<c10::Device> devices(2, torch::kCPU);
  const auto replicas = data_parallel::replicate(net.ptr(), devices);
  const at::Tensor of_replica = replicas[1]->forward(rows(4, 3, 0)).sum();
  {
    const torch::NoGradGuard no_grad;
    net->second->weight.mul_(2);
  }
  EXPECT_THROW(of_replica.backward(), c10::Error);
}

TEST(DataParallel, NothingIsRecordedWithoutGradients) {
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 3}};
  const at::Tensor expected = net(rows(7, 3, 0)).detach();
  {
    const torch::NoGradGuard no_grad;
    const at::Tensor y = model(rows(7, 3, 0).requires_grad_(true));
    EXPECT_FALSE(y.requires_grad());
    std::atomic<int> num_recording = 0;
    data_parallel::run_replicas(model.devices(),
                                [&](size_t) { num_recording += at::GradMode::is_enabled(); });
    EXPECT_EQ(num_recording, 0);
    EXPECT_LE(largest_difference(y, expected), 1e-12);
  }
  const c10::InferenceMode inference;
  const at::Tensor y = model(rows(7, 3, 0));
  EXPECT_TRUE(y.is_inference());
  EXPECT_LE(largest_difference(y, expected), 1e-12);
}

TEST(DataParallel, SecondDerivativesAreThoseOfOneProcess) {
  const auto penalty = [](Net& net, const std::function<at::Tensor(at::Tensor)>& forward) {
    const at::Tensor x = rows(5, 3, 0).requires_grad_(true);
    const at::Tensor slope =
        torch::autograd::grad({forward(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    slope.square().sum().backward();
    return net->second->weight.grad();
  };
  Net alone = make_net();
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 3}};
  EXPECT_LE(largest_difference(penalty(net, [&](at::Tensor x) { return model(x); }),
                               penalty(alone, [&](at::Tensor x) { return alone(x); })),
            1e-12);
}

TEST(DataParallel, AutocastAndModesReachTheReplicas) {
  Net net = make_net(torch::kFloat);
  net->second->eval();  // one child differs
  DataParallel model{net, {.num_replicas = 2}};
  const at::Tensor x = rows(4, 3, 0).to(torch::kFloat);
  const Autocast scope(torch::kBFloat16);
  const at::Tensor y = model(x);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  EXPECT_LE(largest_difference(y, net(x)), 1e-2);
  const std::vector<c10::Device> devices(3, torch::kCPU);
  net->first->weight.set_requires_grad(false);
  const auto make = [](const NetImpl&) {
    const auto made = std::make_shared<NetImpl>();
    made->to(torch::kFloat);
    return made;
  };
  for (const auto& replica : data_parallel::replicate<NetImpl>(net.ptr(), devices, make)) {
    EXPECT_TRUE(replica->is_training());
    EXPECT_TRUE(replica->first->is_training());
    EXPECT_FALSE(replica->second->is_training());
    EXPECT_FALSE(replica->first->weight.requires_grad());
    EXPECT_TRUE(replica->second->weight.requires_grad());
  }
}

TEST(DataParallel, RunningStatisticsAreThoseOfTheFirstPart) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 1));
  torch::nn::BatchNorm1d alone(3);
  DataParallel model{net, {.num_replicas = 2}};
  const at::Tensor x = rows(7, 3, 0).to(torch::kFloat);
  model(x).sum().backward();
  alone(x.slice(0, 0, 4));  // the first part of 7 rows has 4
  const auto found = net[0]->as<torch::nn::BatchNorm1d>();
  EXPECT_LE(largest_difference(found->running_mean, alone->running_mean), 1e-6);
  EXPECT_LE(largest_difference(found->running_var, alone->running_var), 1e-6);
  EXPECT_EQ(found->num_batches_tracked.item<int64_t>(), 1);
}

at::Tensor masks_of(DataParallel<torch::nn::DropoutImpl>& model, int64_t num_rows) {
  return model(torch::ones({num_rows, 50}));
}

TEST(DataParallel, DropoutIsDeterminedByTheSeedAndDiffersBetweenReplicas) {
  torch::nn::Dropout dropout(0.5);
  DataParallel model{dropout, {.num_replicas = 3}};
  torch::manual_seed(11);
  const at::Tensor first = masks_of(model, 6);
  const at::Tensor next = masks_of(model, 6);
  EXPECT_FALSE(torch::equal(first, next));
  for (int i = 0; i < 20; ++i) {
    torch::manual_seed(11);
    ASSERT_TRUE(torch::equal(masks_of(model, 6), first));
  }
  torch::manual_seed(12);
  EXPECT_FALSE(torch::equal(masks_of(model, 6), first));
  EXPECT_FALSE(torch::equal(first.slice(0, 0, 2), first.slice(0, 2, 4)));
  EXPECT_FALSE(torch::equal(first.slice(0, 2, 4), first.slice(0, 4, 6)));
  const double kept = first.ne(0).to(torch::kDouble).mean().item<double>();
  EXPECT_NEAR(kept, 0.5, 0.15);
}

TEST(DataParallel, AModuleWithoutRandomNumbersLeavesTheGeneratorAsItIs) {
  Net net = make_net();
  net->dropout->options.p(0);
  DataParallel model{net, {.num_replicas = 3}};
  torch::manual_seed(5);
  const at::Tensor expected = torch::rand({4});
  torch::manual_seed(5);
  net->eval();
  model(rows(6, 3, 0));
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST(DataParallel, TheFirstErrorNamesItsReplicaAndTheOthersAreJoined) {
  const auto before = testing::count_resources();
  struct ThrowingImpl : torch::nn::Cloneable<ThrowingImpl> {
    void reset() override { weight = register_parameter("weight", torch::ones({3})); }
    at::Tensor forward(const at::Tensor& x) {
      const int64_t row = x[0][0].item<int64_t>();
      if (row > 1) throw std::runtime_error(format("row {} is damaged", row));
      return x * weight;
    }
    at::Tensor weight;
  };
  const auto net = std::make_shared<ThrowingImpl>();
  net->reset();
  DataParallel model{net, {.num_replicas = 3}};
  const at::Tensor x = torch::arange(6).view({6, 1}).expand({6, 3}).to(torch::kFloat);
  expect_in("DataParallel: replica 1 of 3 on cpu: row 2 is damaged", message_of([&] { model(x); }));
  EXPECT_EQ(testing::leftovers_since(before), "");
  model(x.slice(0, 0, 1));  // still works
}

TEST(DataParallel, TuplesOptionalsAndScalarsPassThrough) {
  struct PairImpl : torch::nn::Cloneable<PairImpl> {
    void reset() override { weight = register_parameter("weight", torch::full({}, 2.0)); }
    std::tuple<at::Tensor, std::tuple<at::Tensor>> forward(const at::Tensor& x,
                                                           const std::optional<at::Tensor>& bias,
                                                           const std::string& word) {
      const at::Tensor y = x * weight + (bias ? *bias : torch::zeros({1}));
      return {y + static_cast<double>(word.size()), std::tuple(y.sum())};
    }
    at::Tensor weight;
  };
  const auto net = std::make_shared<PairImpl>();
  net->reset();
  DataParallel model{net, {.num_replicas = 2}};
  const at::Tensor x = torch::arange(5.0);
  const auto [y, rest] = model(x, std::optional<at::Tensor>(x * 10), std::string("abc"));
  EXPECT_TRUE(torch::equal(y, x * 12 + 3));
  EXPECT_TRUE(torch::equal(std::get<0>(rest), torch::tensor({36.0F, 84.0F})));
  EXPECT_TRUE(
      torch::equal(std::get<0>(model(x, std::optional<at::Tensor>(), std::string())), x * 2));
}

struct PlainNet : torch::nn::Module {
  explicit PlainNet(int64_t width) : layer(register_module("layer", torch::nn::Linear(3, width))) {}
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer;
};

TEST(DataParallel, WhatCannotBeDividedOrCopiedIsRefused) {
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 2}};
  const at::Tensor x = rows(4, 3, 0);
  expect_in("has 0 dimensions", message_of([&] { model(torch::ones({}, torch::kDouble)); }));
  expect_in("is undefined", message_of([&] { model(at::Tensor()); }));
  expect_in("number of replicas is 0", message_of([&] { DataParallel{net, {}}; }));
  expect_in("number of replicas is -2", message_of([&] {
              DataParallel{net, {.num_replicas = -2}};
            }));
  expect_in("there are 1 devices and num_replicas is 2", message_of([&] {
              DataParallel{net, {.devices = {torch::kCPU}, .num_replicas = 2}};
            }));
  expect_in("the module is null",
            message_of([&] { DataParallel<NetImpl>(nullptr, {.num_replicas = 2}); }));
  net->register_buffer("scale", torch::ones({1}).requires_grad_(true));
  expect_in("buffer scale requires a gradient", message_of([&] { model(x); }));

  const auto plain = std::make_shared<PlainNet>(2);
  DataParallel of_plain{plain, {.num_replicas = 2}};
  expect_in("derive it from torch::nn::Cloneable",
            message_of([&] { of_plain(x.to(torch::kFloat)); }));
  DataParallel<PlainNet> of_wrong(plain, {.num_replicas = 2},
                                  [](const PlainNet&) { return std::make_shared<PlainNet>(5); });
  expect_in("parameter layer.weight of the replica has another shape",
            message_of([&] { of_wrong(x.to(torch::kFloat)); }));
  DataParallel<PlainNet> of_same(plain, {.num_replicas = 2},
                                 [&](const PlainNet&) { return plain; });
  expect_in("no module of its own", message_of([&] { of_same(x.to(torch::kFloat)); }));
  DataParallel<PlainNet> right(plain, {.num_replicas = 2},
                               [](const PlainNet&) { return std::make_shared<PlainNet>(2); });
  EXPECT_LE(largest_difference(right(x.to(torch::kFloat)), plain->forward(x.to(torch::kFloat))),
            1e-6);
}

TEST(DataParallel, ABatchWithoutRowsIsOnePart) {
  Net net = make_net();
  DataParallel model{net, {.num_replicas = 3}};
  EXPECT_EQ(model(torch::ones({0, 3}, torch::kDouble)).sizes(), (std::vector<int64_t>{0, 2}));
}

TEST(DataParallel, ScatterAndGatherAreInverse) {
  const std::vector<c10::Device> devices(3, torch::kCPU);
  for (const int64_t dim : {0, 1}) {
    const at::Tensor x = rows(7, 5, 0).requires_grad_(true);
    const auto parts = data_parallel::scatter(x, devices, dim);
    const at::Tensor y = data_parallel::gather(parts, torch::kCPU, dim);
    EXPECT_TRUE(torch::equal(y, x));
    (y * rows(7, 5, 1)).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), rows(7, 5, 1)));
  }
  EXPECT_EQ(data_parallel::scatter(rows(2, 5, 0), devices).size(), 2U);
  expect_in("there is no device", message_of([] { data_parallel::scatter(rows(2, 5, 0), {}); }));
  expect_in("there is no output", message_of([] { data_parallel::gather({}, torch::kCPU); }));
  const std::vector<at::Tensor> mixed = {torch::ones({2}), torch::ones({})};
  expect_in("output 0 has 1 dimensions and output 1 has 0",
            message_of([&] { data_parallel::gather(mixed, torch::kCPU); }));
}

TEST(DataParallel, TheFourFunctionsCompose) {
  Net net = make_net();
  const at::Tensor x = rows(7, 3, 0);
  const std::vector<c10::Device> devices(3, torch::kCPU);
  const auto inputs = data_parallel::scatter(x, devices);
  const auto replicas = data_parallel::replicate(net.ptr(), devices);
  const auto outputs = data_parallel::parallel_apply<NetImpl>(replicas, inputs);
  EXPECT_LE(largest_difference(data_parallel::gather(outputs, torch::kCPU), net(x)), 1e-12);
}

at::Tensor checkpoint_of(const std::function<at::Tensor(const at::Tensor&)>& block,
                         const at::Tensor& x) {
  return checkpoint(
      [block](const std::vector<at::Tensor>& inputs) -> std::vector<at::Tensor> {
        return {block(inputs[0])};
      },
      {x})[0];
}

// A checkpointed block draws the same mask in backward as in forward.
TEST(DataParallel, ActivationCheckpointsDrawTheSameNumbersAgain) {
  struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
    void reset() override { weight = register_parameter("weight", torch::ones({40})); }
    at::Tensor forward(const at::Tensor& x) {
      const auto block = [this](const at::Tensor& in) {
        return torch::dropout(in * weight, 0.5, /*train=*/true);
      };
      return is_checkpointed ? checkpoint_of(block, x) : block(x);
    }
    at::Tensor weight;
    bool is_checkpointed = false;
  };
  const auto gradient = [](bool is_checkpointed) {
    const auto net = std::make_shared<BlockImpl>();
    net->reset();
    net->is_checkpointed = is_checkpointed;
    DataParallel model{net, {.num_replicas = 3}};
    torch::manual_seed(4);
    const at::Tensor y = model((rows(6, 40, 0).to(torch::kFloat)).requires_grad_(true));
    torch::rand({10});  // the program's own numbers, between forward and backward
    y.sum().backward();
    return net->weight.grad();
  };
  EXPECT_LE(largest_difference(gradient(true), gradient(false)), 1e-6);
}

}  // namespace
}  // namespace cadre
