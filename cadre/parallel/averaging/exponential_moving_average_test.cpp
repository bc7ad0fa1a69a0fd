// Compares ExponentialMovingAverage with the formula in double precision.
// tests/parity/wrapper_parity_test.py compares it with torch.optim.swa_utils.AveragedModel.
#include "cadre/parallel/averaging/exponential_moving_average.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre::moving_average {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;
namespace nn = torch::nn;

struct Model : nn::Module {
  explicit Model(torch::ScalarType dtype = torch::kDouble) {
    const auto options = torch::TensorOptions().dtype(dtype);
    weight = register_parameter("weight", torch::linspace(-1, 1, 6, options).view({2, 3}));
    tied = register_parameter("tied", weight);
    frozen = register_parameter("frozen", torch::ones({3}, options), /*requires_grad=*/false);
    mean = register_buffer("mean", torch::zeros({2}, options));
    count = register_buffer("count", torch::zeros({}, torch::kLong));
  }
  Tensor weight, tied, frozen, mean, count;
};

void set_weights(Model& model, int step) {
  const torch::NoGradGuard no_grad;
  model.weight.copy_(torch::sin(torch::arange(6, torch::kDouble) * (1.0 + step)).view({2, 3}));
  model.mean.fill_(std::cos(step));
  model.count.add_(1);
}

Tensor average_of(const ExponentialMovingAverage& average, const std::string& name) {
  for (const NamedTensor& one : average.averages()) {
    if (one.name == name) return one.tensor;
  }
  return {};
}

std::string refusal_of(const std::function<void()>& call) {
  return error_of(call, ErrorCode::kInvalidArgument);
}

TEST(ExponentialMovingAverage, FollowsItsFormula) {
  constexpr double kDecay = 0.8;
  const auto model = std::make_shared<Model>();
  ExponentialMovingAverage average{model, {.decay = kDecay, .average_buffers = true}};
  EXPECT_TRUE(torch::equal(average_of(average, "weight"), model->weight.detach()));
  Tensor expected;
  double mean = 0;
  for (int step = 0; step < 5; ++step) {
    set_weights(*model, step);
    average.update();
    const Tensor weight = model->weight.detach();
    expected = step == 0 ? weight.clone() : kDecay * expected + (1 - kDecay) * weight;
    mean = step == 0 ? std::cos(0) : kDecay * mean + (1 - kDecay) * std::cos(step);
  }
  EXPECT_TRUE(torch::allclose(average_of(average, "weight"), expected, 1e-13, 1e-14));
  EXPECT_NEAR(average_of(average, "mean")[1].item<double>(), mean, 1e-14);
  EXPECT_FALSE(average_of(average, "count").defined());
  EXPECT_EQ(average.averages().size(), 3U) << "a tied weight counts once";
  EXPECT_EQ(average.num_updates(), 5);
}

// A weight of 1 in bfloat16 would not change by a thousandth of 1.
TEST(ExponentialMovingAverage, WeightsOf16BitsAreAveragedInFloat32) {
  const auto model = std::make_shared<Model>(torch::kBFloat16);
  ExponentialMovingAverage average{model, {.decay = 0.999}};
  const torch::NoGradGuard no_grad;
  model->weight.fill_(1);
  average.update();
  model->weight.fill_(2);
  for (int i = 0; i < 10; ++i) average.update();
  EXPECT_NEAR(average_of(average, "weight")[0][0].item<double>(), 2 - std::pow(0.999, 10), 1e-6);
}

TEST(ExponentialMovingAverage, TheModuleHasTheAveragesInTheScopeOnly) {
  const auto model = std::make_shared<Model>();
  ExponentialMovingAverage average{model, {.decay = 0.5}};
  for (int step = 0; step < 3; ++step) {
    set_weights(*model, step);
    average.update();
  }
  const Tensor own = model->weight.detach().clone();
  {
    const auto averaged = average.swap_in();
    EXPECT_TRUE(torch::equal(model->weight.detach(), average_of(average, "weight")));
    EXPECT_FALSE(torch::equal(model->weight.detach(), own));
    EXPECT_TRUE(model->tied.is_same(model->weight));
    EXPECT_EQ(model->mean[0].item<double>(), std::cos(2)) << "the buffers are those of the module";
    EXPECT_THAT(refusal_of([&] { average.update(); }), HasSubstr("averaged weights"));
    EXPECT_THAT(refusal_of([&] { auto again = average.swap_in(); }), HasSubstr("already"));
  }
  EXPECT_TRUE(torch::equal(model->weight.detach(), own));
  {
    const auto averaged = average.swap_in();
    const torch::NoGradGuard no_grad;
    model->weight.add_(1);
  }
  EXPECT_TRUE(torch::equal(model->weight.detach(), own));
  EXPECT_THAT(refusal_of([&] { average.update(); }), HasSubstr("\"weight\" was changed"));
  average.update();
}

TEST(ExponentialMovingAverage, AResumedRunGivesTheSameBits) {
  const auto model = std::make_shared<Model>(torch::kFloat);
  ExponentialMovingAverage average{model, {.decay = 0.9}};
  for (int step = 0; step < 3; ++step) {
    set_weights(*model, step);
    average.update();
  }
  const auto state = average.state();
  ExponentialMovingAverage resumed{model, {.decay = 0.9}};
  resumed.load_state(state);
  set_weights(*model, 3);
  average.update();
  resumed.update();
  EXPECT_TRUE(torch::equal(average_of(average, "weight"), average_of(resumed, "weight")));
  EXPECT_EQ(resumed.num_updates(), 4);
  const auto refused = [&](const ExponentialMovingAverage::State& bad) {
    const Tensor before = average_of(resumed, "weight").clone();
    const std::string message = refusal_of([&] { resumed.load_state(bad); });
    EXPECT_TRUE(torch::equal(average_of(resumed, "weight"), before));
    return message;
  };
  auto bad = state;
  bad.pop_back();
  EXPECT_THAT(refused(bad), HasSubstr("no tensor \"average.frozen\""));
  bad = state;
  bad[1].second = torch::ones({2, 3}, torch::kDouble);
  EXPECT_THAT(refused(bad), HasSubstr("dtype"));
  bad = state;
  bad[0].second = torch::tensor(int64_t{-4});
  EXPECT_THAT(refused(bad), HasSubstr("damaged"));
  bad = state;
  bad.emplace_back("average.mean", torch::zeros({2}));
  EXPECT_THAT(refused(bad), HasSubstr("uses 3"));
}

TEST(ExponentialMovingAverage, WhatHasNoMeaningIsRefused) {
  const auto model = std::make_shared<Model>();
  for (const double decay : {-0.1, 1.0, std::nan("")}) {
    EXPECT_THAT(refusal_of([&] { ExponentialMovingAverage(model, {.decay = decay}); }),
                HasSubstr("the decay is"));
  }
  EXPECT_THAT(refusal_of([] { ExponentialMovingAverage(std::shared_ptr<nn::Module>()); }),
              HasSubstr("null"));
  ExponentialMovingAverage average{model};
  model->register_parameter("more", torch::ones({1}));
  EXPECT_THAT(refusal_of([&] { average.update(); }), HasSubstr("\"more\" was added"));
  testing::expect_on_ranks(2, [](const ProcessGroup& group) {
    nn::Linear net(4, 4);
    FullyShardedDataParallel wrapper{net, group};
    testing::require_refused([&] { ExponentialMovingAverage{net}; }, "has no values");
  });
}

}  // namespace
}  // namespace cadre::moving_average
