// Tests programs that use memory of the wrapper: gradients that they keep from an earlier step,
// gradients that they assign, and buffers that an autograd graph has saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::ddp_memory {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr auto kDouble = torch::kDouble;

struct Pair : nn::Module {
  Pair() {
    a = register_parameter("a", torch::ones({3}, kDouble));
    b = register_parameter("b", torch::ones({2}, kDouble));
  }
  Tensor forward(const Tensor& x) { return x.mean() * (a.sum() + 2 * b.sum()); }
  Tensor a, b;
};

Tensor x_of(const ProcessGroup& group, int step) {
  return torch::full({1}, 1.0 + group.rank() + 10 * step, kDouble);
}

bool is_full_of(const Tensor& tensor, double value) {
  return torch::allclose(tensor, torch::full_like(tensor, value), 1e-12, 0);
}

struct Keep {
  const char* name;
  std::function<Tensor(const Tensor& gradient)> kept;
};

// The program keeps the gradient of b of each step: the tensor itself, a view or a detached alias.
// Later steps must not change the values.
TEST(DdpKeptGradients, KeepTheirValuesWhenTheParametersHaveOthers) {
  const std::vector<Keep> keeps = {
      {"handle", [](const Tensor& gradient) { return gradient; }},
      {"view", [](const Tensor& gradient) { return gradient.view({-1}).narrow(0, 0, 2); }},
      {"detached", [](const Tensor& gradient) { return gradient.detach(); }},
  };
  for (const Keep& keep : keeps) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
      const auto net = std::make_shared<Pair>();
      DistributedDataParallel model{net, group};
      model(x_of(group, 0)).backward();
      std::vector<Tensor> kept;
      for (int step = 1; step <= 3; ++step) {
        net->zero_grad();
        model(x_of(group, step)).backward();
        require(is_full_of(net->a.grad(), 1.5 + 10 * step), "a");
        require(is_full_of(net->b.grad(), 2 * (1.5 + 10 * step)), "b");
        // Only rank 0 keeps gradients.
        if (group.rank() == 0) kept.push_back(keep.kept(net->b.grad()));
      }
      for (size_t i = 0; i < kept.size(); ++i) {
        require(is_full_of(kept[i], 2 * (1.5 + 10.0 * static_cast<double>(i + 1))),
                format("{} of step {} has changed", keep.name, i + 1));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(DdpKeptGradients, NothingMovesWhereNothingIsKept) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, group};
    model(x_of(group, 0)).backward();
    const void* const home = net->a.grad().const_data_ptr();
    for (int step = 1; step <= 20; ++step) {
      net->zero_grad();
      model(x_of(group, step)).backward();
      require(net->a.grad().const_data_ptr() == home, "moved");
    }
    // A gradient that accumulates must stay the same tensor in the same memory.
    const Tensor handle = net->a.grad();
    model(x_of(group, 0)).backward();
    require(handle.is_same(net->a.grad()) && handle.const_data_ptr() == home, "replaced");
    // Now the program clears only the gradient of b, and keeps its tensor.
    const Tensor kept = net->b.grad();
    const Tensor before = kept.clone();
    net->b.mutable_grad().reset();
    model(x_of(group, 0)).backward();
    require(handle.is_same(net->a.grad()) && handle.const_data_ptr() == home, "a stays in use");
    require(torch::equal(kept, before), "b is kept");
    require(is_full_of(net->b.grad(), 3.0), "b begins anew");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An alias of a gradient that is still in use shares its memory, so it must show what later
// backwards add.
TEST(DdpKeptGradients, AnAliasAccumulatesWithItsGradient) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, group};
    model(x_of(group, 0)).backward();
    for (const Tensor& alias : {net->a.grad().detach(), net->a.grad().narrow(0, 1, 2)}) {
      net->a.grad().zero_();
      for (int pass = 1; pass <= 3; ++pass) {
        model(x_of(group, 0)).backward();
        require(is_full_of(net->a.grad(), 1.5 * pass), "accumulated");
        require(is_full_of(alias, 1.5 * pass), format("the alias in pass {}", pass));
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpAssignedGradients, AreReducedByReduceGradients) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, group};
    const double own = group.rank() == 0 ? 2.0 : 6.0;
    for (int round = 0; round < 2; ++round) {
      net->a.mutable_grad() = torch::full({3}, own, kDouble);
      model.reduce_gradients();
      require(is_full_of(net->a.grad(), 4.0), "assigned");
      require(round == 1 || !net->b.grad().defined(), "untouched");
      net->a.mutable_grad().fill_(own * 10);
      model.reduce_gradients();
      require(is_full_of(net->a.grad(), 40.0), "changed in place");
      model.reduce_gradients();
      require(is_full_of(net->a.grad(), 40.0), "once more");
      net->zero_grad();
      model(x_of(group, 0)).backward();
      require(is_full_of(net->a.grad(), 1.5), "an ordinary step");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program drops accumulated gradients by assigning zeros. Their samples, 14 on rank 0 and 2 on
// rank 1, must not count in the weights, only the later 3 and 1.
TEST(DdpAssignedGradients, FreshZerosClearTheSamplesOfAnAccumulation) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Pair>();
    DistributedDataParallel model{net, group};
    const bool is_first = group.rank() == 0;
    {
      const auto guard = model.no_sync();
      for (int part = 0; part < 2; ++part) {
        model(torch::ones({is_first ? 7 : 1}, kDouble)).backward();
      }
      for (Tensor& parameter : net->parameters()) {
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
      model(torch::full({is_first ? 3 : 1}, is_first ? 4.0 : 8.0, kDouble)).backward();
    }
    model.reduce_gradients();
    require(is_full_of(net->a.grad(), (3 * 4.0 + 8.0) / 4), "by 3 rows and 1");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The forward multiplies by a buffer, so the backward reads this buffer.
struct Scaled : nn::Module {
  Scaled() {
    weight = register_parameter("weight", torch::ones({1}, kDouble));
    scale = register_buffer("scale", torch::ones({1}, kDouble));
  }
  Tensor forward(const Tensor& x) { return (x * weight * scale).mean(); }
  Tensor weight, scale;
};

TEST(DdpBuffers, ABufferThatAGraphHasSavedIsNotOverwrittenUnnoticed) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<Scaled>();
    DistributedDataParallel model{net, group, {.weighting = GradientWeighting::kEqual}};
    const Tensor x = torch::ones({1}, kDouble);
    net->scale.fill_(1.0 + group.rank());
    Tensor first;
    {
      // Buffers are not broadcast, so this forward uses this rank's buffer.
      const auto guard = model.no_sync();
      first = model(x);
    }
    // Rank 0's buffer is broadcast, over the one that `first` has saved.
    const Tensor second = model(x);
    output = failure_of([&] { (first + second).backward(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[1].output, HasSubstr("modified by an inplace operation"));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("rank 1 left this backward by an exception"));
}

TEST(DdpBuffers, EqualValuesAreNoChange) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Scaled>();
    net->scale.fill_(3.0);
    DistributedDataParallel model{net, group};
    const Tensor x = torch::ones({1}, kDouble);
    net->scale.mul_(2);  // all ranks have equal buffers, so the broadcast changes no value
    const Tensor first = model(x);
    (first + model(x)).backward();
    require(is_full_of(net->weight.grad(), 12.0), "6 and 6");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::ddp_memory
