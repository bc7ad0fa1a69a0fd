// Tests unusual uses of the wrapper: options that differ between the ranks, constructors that throw
// on one rank, wrappers that were moved from, and backwards in another order than their forwards.
// Also tests that the reduction overlaps with the backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::ddp_usage {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using testing::failure_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr auto kDouble = torch::kDouble;

nn::Linear small_linear() {
  nn::Linear linear(nn::LinearOptions(1, 1).bias(false));
  linear->to(kDouble);
  const torch::NoGradGuard no_grad;
  linear->weight.fill_(1);
  return linear;
}

struct OptionCase {
  const char* name;
  std::function<void(DistributedDataParallelOptions&)> change;
  const char* text;
};

TEST(DdpOptions, ThatDifferAreNamedOnAllRanks) {
  const std::vector<OptionCase> cases = {
      {"layout", [](auto& options) { options.layout = BucketLayout::parse("float64:0"); },
       "layout is none on rank 0 and \"float64:0\" on rank 1"},
      {"caps", [](auto& options) { options.bucket_caps.bytes = 8; },
       "bucket_caps.bytes is 26214400 on rank 0 and 8 on rank 1"},
      {"weighting", [](auto& options) { options.weighting = GradientWeighting::kEqual; },
       "weighting is GradientWeighting::kSamples on rank 0 and GradientWeighting::kEqual on rank "
       "1"},
      {"buffers", [](auto& options) { options.broadcast_buffers = false; },
       "broadcast_buffers is true on rank 0 and false on rank 1"},
      {"gradients", [](auto& options) { options.gradients = GradientPlacement::kSharded; },
       "gradients is GradientPlacement::kReplicated on rank 0 and GradientPlacement::kSharded"},
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    for (const OptionCase& option : cases) {
      DistributedDataParallelOptions options;
      if (group.rank() == 1) option.change(options);
      nn::Linear linear = small_linear();
      output += failure_of([&] { DistributedDataParallel(linear, group, options); }) + "\n";
      // Works, because the failed constructor has not changed the module.
      DistributedDataParallel model{linear, group};
      model(torch::ones({1, 1}, kDouble)).sum().backward();
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  for (const OptionCase& option : cases) {
    EXPECT_THAT(result.ranks[1].output, HasSubstr(option.text)) << option.name;
  }
}

TEST(DdpRefusals, OfOneRankAreThrownOnAllRanksBeforeAnythingIsChanged) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const bool is_wrong = group.rank() == 1;
    const auto try_to_wrap = [&](const std::shared_ptr<nn::LinearImpl>& module,
                                 const DistributedDataParallelOptions& options = {}) {
      output +=
          failure_of([&] { DistributedDataParallel<nn::LinearImpl>(module, group, options); });
      output += "\n";
    };
    nn::Linear linear = small_linear();
    try_to_wrap(is_wrong ? nullptr : linear.ptr());
    nn::Linear complex = small_linear();
    if (is_wrong) complex->to(torch::kComplexDouble);
    try_to_wrap(complex.ptr());
    nn::Linear frozen = small_linear();
    if (is_wrong) frozen->weight.set_requires_grad(false);
    try_to_wrap(frozen.ptr());
    {
      const ProcessGroup other = *group.split({.color = group.rank(), .name = "alone"});
      nn::Linear wrapped = small_linear();
      std::optional<DistributedDataParallel<nn::LinearImpl>> first;
      if (is_wrong) {
        first.emplace(wrapped.ptr(), other,
                      DistributedDataParallelOptions{.gradients = GradientPlacement::kSharded});
      }
      try_to_wrap(wrapped.ptr());
      first.reset();
      other.close();
    }
    try_to_wrap(linear.ptr(),
                is_wrong
                    ? DistributedDataParallelOptions{.layout = BucketLayout::parse("float64:0,1")}
                    : DistributedDataParallelOptions{});
    DistributedDataParallel model{linear, group};
    model(torch::full({1, 1}, 1.0 + group.rank(), kDouble)).sum().backward();
    require(linear->weight.grad().item<double>() == 1.5, "the group goes on");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  EXPECT_THAT(result.ranks[0].output,
              AllOf(HasSubstr("the module is null"), HasSubstr("\"weight\" is ComplexDouble"),
                    HasSubstr("requires grad"), HasSubstr("is wrapped already"),
                    HasSubstr("(on rank 1 of 2")));
}

TEST(DdpWrappers, ThatWereMovedFromSaySo) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    DistributedDataParallel model{small_linear(), group};
    DistributedDataParallel moved = std::move(model);
    const Tensor x = torch::ones({1, 1}, kDouble);
    const std::vector<std::function<void()>> calls = {
        [&] { model(x); },
        [&] { model.zero_grad(); },  // NOLINT: tests the use after the move
        [&] { model->zero_grad(); },
        [&] { (void)model.no_sync(); },
        [&] { model.reduce_gradients(); },
        [&] { model.mean_over_ranks(x); },
        [&] { model.eval(); },
        [&] { (void)model.learned_layout(); },
        [&] { (void)model.parameter_shards(); }};
    for (const auto& call : calls) output += failure_of(call) + "\n";
    moved(x).sum().backward();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    size_t count = 0;
    for (size_t at = 0; (at = rank.output.find("had moved from it", at)) != std::string::npos;
         ++at) {
      ++count;
    }
    EXPECT_EQ(count, 9U) << rank.output;
  }
}

// The error for a parameter that was unfrozen recommends a new wrapper. This must work.
TEST(DdpWrappers, AModuleIsWrappedAgainAfterAParameterWasUnfrozen) {
  struct TwoLayers : nn::Module {
    TwoLayers() {
      first = register_module("first", small_linear());
      second = register_module("second", small_linear());
      first->weight.set_requires_grad(false);
    }
    Tensor forward(const Tensor& x) { return second(first(x)); }
    nn::Linear first{nullptr}, second{nullptr};
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<TwoLayers>();
    std::optional<DistributedDataParallel<TwoLayers>> model(std::in_place, net, group);
    const Tensor x = torch::full({1, 1}, 1.0 + group.rank(), kDouble);
    (*model)(x).sum().backward();
    net->zero_grad();
    net->first->weight.set_requires_grad(true);
    output = failure_of([&] { (*model)(x); });
    model.reset();
    model.emplace(net, group);
    (*model)(x).sum().backward();
    require(net->first->weight.grad().item<double>() == 1.5, "first");
    require(net->second->weight.grad().item<double>() == 1.5, "second");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(
      result.ranks[0].output,
      AllOf(HasSubstr("\"first.weight\" was frozen and requires grad now"),
            HasSubstr("Wrap the module again after the change, on all ranks, once this wrapper "
                      "is destroyed")));
}

// A program that runs the backward of each forward, but later or in an unusual way. It must not be
// logged that forwards were left without a backward.
using Step = std::function<void(DistributedDataParallel<nn::LinearImpl>& model,
                                DistributedDataParallel<nn::LinearImpl>& critic, const Tensor& x)>;

void expect_nothing_left_behind(const char* name, const Step& step) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto result =
      run_groups(2,
                 [&](const ProcessGroup& group, std::string&) {
                   DistributedDataParallel model{small_linear(), group};
                   DistributedDataParallel critic{small_linear(), group};
                   for (int round = 0; round < 3; ++round) {
                     step(model, critic, torch::full({2, 1}, 1.0 + group.rank(), kDouble));
                     model.zero_grad();
                     critic.zero_grad();
                   }
                 },
                 {.log = log});
  EXPECT_TRUE(result.ok()) << name << ": " << result.failures();
  EXPECT_THAT(log->get(), Not(Contains(HasSubstr("left behind")))) << name;
}

TEST(DdpLeftBehind, IsNotLoggedForForwardsThatABackwardCarriesLater) {
  expect_nothing_left_behind("the newest first", [](auto& model, auto&, const Tensor& x) {
    const Tensor first = model(x).sum();
    const Tensor second = model(x).sum();
    second.backward();
    first.backward();
  });
  expect_nothing_left_behind("a view, changed in place", [](auto& model, auto&, const Tensor& x) {
    const Tensor y = model(x);
    y.view({-1}).mul_(2);
    y.sum().backward();
  });
  expect_nothing_left_behind("a view alone", [](auto& model, auto&, const Tensor& x) {
    const Tensor y = model(x);
    const Tensor rows = y.narrow(0, 0, 1);
    rows.mul_(2);
    rows.sum().backward();
  });
  expect_nothing_left_behind(
      "a generator and its critic", [](auto& model, auto& critic, const Tensor& x) {
        critic(model(x).detach()).sum().backward();
        const Tensor loss = critic(model(x)).sum();
        torch::autograd::backward({loss}, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                  /*inputs=*/{model->weight});
      });
}

// Backward computes the gradient of the first layer last. At that time the reductions of the other
// layers' buckets must have been started.
TEST(DdpOverlap, BucketsAreIssuedBeforeTheLastGradientIsComputed) {
  struct Deep : nn::Module {
    Deep() {
      for (int i = 0; i < 4; ++i) {
        layers.push_back(register_module(format("layer_{}", i), nn::Linear(8, 8)));
      }
    }
    Tensor forward(Tensor x) {
      for (nn::Linear& layer : layers) x = torch::tanh(layer(x));
      return x;
    }
    std::vector<nn::Linear> layers;
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Deep>();
    DistributedDataParallel model{
        net,
        group,
        {.weighting = GradientWeighting::kEqual, .bucket_caps = {.first_bytes = 64, .bytes = 64}}};
    const Tensor x = torch::ones({4, 8});
    model(x).sum().backward();  // this backward determines the layout
    uint64_t num_before_last = 0;
    net->layers[0]->weight.register_hook(
        [&](const Tensor&) { num_before_last = group.communicator().num_collectives(); });
    const Tensor loss = model(x).sum();
    const uint64_t num_before = group.communicator().num_collectives();
    loss.backward();
    const uint64_t num_after = group.communicator().num_collectives();
    // Each of 4 layers has a bucket: 4 reductions in total, of which 3 are started before the last
    // gradient is computed.
    require(num_after - num_before == 4, format("{} in all", num_after - num_before));
    require(num_before_last - num_before == 3,
            format("{} before the last gradient", num_before_last - num_before));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::ddp_usage
