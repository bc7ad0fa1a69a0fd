// Tests what the ranks of a ZeRO optimizer compare, and how its parameters are divided into flat
// buffers. The tests set the gradients to equal values on all ranks, and then change them on rank
// 1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

// A model whose layer "a" has a weight of 1,000 and a bias of 50 elements, and layer "b" of 250 and
// 5.
struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    a = register_module("a", torch::nn::Linear(20, 50));
    b = register_module("b", torch::nn::Linear(50, 5));
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) parameter.fill_(1);
  }
  void set_gradients() {
    for (Tensor& parameter : parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  }
  bool holds(double value) const {
    bool all = true;
    for (const Tensor& parameter : parameters()) {
      all = all && parameter.detach().eq(value).all().item<bool>();
    }
    return all;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};

using DividedSgd = ZeroRedundancyOptimizer<torch::optim::SGD>;

// Makes num_steps_before steps, lets rank 1 change its gradients, and returns the error of the next
// step, which must be the same on both ranks and must change no parameter.
std::string refusal_of_step(int num_steps_before, const std::function<void(TwoLayers&)>& change) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    TwoLayers net;
    DividedSgd zero(net.named_parameters(), group, torch::optim::SGDOptions(1));
    for (int step = 0; step <= num_steps_before; ++step) {
      net.set_gradients();
      if (step < num_steps_before) zero.step();
    }
    if (group.rank() == 1) change(net);
    output = failure_of([&] { zero.step(); });
    require(net.holds(1 - num_steps_before), "nothing was stepped");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  const std::string first = result.ranks[0].output;
  const std::string second = result.ranks[1].output;
  EXPECT_EQ(first.substr(first.find("ranks 0 and 1")), second.substr(second.find("ranks 0 and 1")));
  return first;
}

// Rank 1 changes the first or the last element of a gradient. The first step compares all elements;
// later steps compare samples, which include these two.
TEST(ZeroAgreement, ComparesTheFirstAndTheLastElementInEveryStep) {
  for (const int num_steps_before : {0, 2}) {
    for (const int64_t element : {0, 999}) {
      const std::string refusal = refusal_of_step(num_steps_before, [&](TwoLayers& net) {
        net.a->weight.mutable_grad().view(-1)[element] = 2;
      });
      EXPECT_THAT(refusal, HasSubstr("ranks 0 and 1 have different gradients of \"a.weight\""))
          << "after " << num_steps_before << " steps, element " << element;
    }
  }
}

// A gradient is zeros on rank 0 and undefined on rank 1. This must be an error, because an
// optimizer applies weight decay to a parameter with a zero gradient, but not to one without a
// gradient.
TEST(ZeroAgreement, TellsNoGradientFromOneOfZeros) {
  for (const int num_steps_before : {0, 2}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      TwoLayers net;
      DividedSgd zero(net.named_parameters(), group, torch::optim::SGDOptions(1));
      for (int step = 0; step < num_steps_before; ++step) {
        net.set_gradients();
        net.b->bias.mutable_grad().zero_();
        zero.step();
      }
      net.set_gradients();
      net.b->bias.mutable_grad().zero_();
      if (group.rank() == 1) net.b->bias.mutable_grad().reset();
      output = failure_of([&] { zero.step(); });
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output, HasSubstr("ranks 0 and 1 have different gradients of \"b.bias\""))
          << "after " << num_steps_before << " steps";
    }
  }
}

TEST(ZeroAgreement, RefusesStatesOfOtherStepsOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    TwoLayers net;
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(net.named_parameters(), group,
                                                      torch::optim::AdamWOptions(0.1));
    net.set_gradients();
    zero.step();
    std::vector<ParameterState> states = zero.state_dict();
    require(states.size() == 4, "four states");
    if (group.rank() == 1) states[2].scalars[0].tensor = torch::tensor(int64_t{7});
    output = failure_of([&] { zero.load_state_dict(states); });
    for (const ParameterState& state : zero.state_dict()) {
      require(state.scalars[0].tensor.item<int64_t>() == 1, "the state from before");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("the state of parameter 2 is not the same on all ranks"));
    EXPECT_THAT(rank.output, HasSubstr("load the same state"));
  }
}

// The parameters have 4,000, 200, 1,000 and 20 bytes. A parameter with which a buffer would exceed
// the cap begins a new buffer.
TEST(ZeroAgreement, ABufferIsClosedBeforeItExceedsTheCap) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const auto& [cap, expected] :
         {std::pair<int64_t, size_t>{1 << 20, 1}, {4200, 2}, {4000, 2}, {1100, 3}, {100, 4}}) {
      TwoLayers net;
      const DividedSgd zero(net.named_parameters(), group, torch::optim::SGDOptions(1),
                            {.bucket_cap_bytes = cap});
      std::set<const void*> buffers;
      for (const ParameterShard& shard : zero.parameter_shards()) {
        buffers.insert(shard::FlatParameters::of(shard.memory).get());
      }
      require(buffers.size() == expected,
              std::to_string(buffers.size()) + " buffers of " + std::to_string(cap) + " bytes");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Stage 1: the shards have gradients only during a step, as views of those of the parameters. After
// the step only the parameters must have gradients.
TEST(ZeroAgreement, ShardsHaveNoGradientAfterAStepOfWholeGradients) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    TwoLayers net;
    DividedSgd zero(net.named_parameters(), group, torch::optim::SGDOptions(1),
                    {.bucket_cap_bytes = 1100});
    net.set_gradients();
    zero.step();
    require(net.holds(0), "a step");
    for (const ParameterShard& shard : zero.parameter_shards()) {
      require(!shard.values.grad().defined(), shard.name);
      require(shard.parameter.grad().defined(), shard.name);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
