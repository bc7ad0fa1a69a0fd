// Tests whole gradients that are not reduced yet, and what happens if the program changes them, or
// the gradients of the shards, before the reduction. The tests make gradients by
// parameter.backward(gradient), which reads no value of the parameter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/buckets/sharded_gradients.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr int64_t kNumel = 40;

// Two parameters in one bucket, sharded over the ranks of a group.
struct Shards {
  explicit Shards(const ProcessGroup& world, const std::optional<Tensor>& earlier = {})
      : parameters(make_parameters(earlier)),
        unit(std::make_shared<shard::FlatParameters>(parameters, world,
                                                     shard::FlatParametersOptions{})),
        rank(world.rank()) {
    storage = std::make_unique<ShardedGradients>(
        parameters, std::span(&unit, 1), ShardedGradients::Groups{.all = world, .shard = world},
        ShardedGradients::Options{.trailer_numel = 1, .wrapper = "DistributedDataParallel"});
  }
  static std::vector<NamedTensor> make_parameters(const std::optional<Tensor>& earlier) {
    std::vector<NamedTensor> made;
    for (const char* name : {"a", "b"}) {
      made.push_back({name, torch::zeros({kNumel}).requires_grad_(true)});
      if (earlier) made.back().tensor.mutable_grad() = earlier->clone();
    }
    return made;
  }

  Tensor values(size_t i) const { return unit->values(i); }
  // Adds a gradient to that of parameter i, as autograd does in a backward.
  void arrive(size_t i, double gradient) const {
    parameters[i].tensor.backward(torch::full({kNumel}, gradient));
  }
  void accumulate(size_t i, double gradient) const {
    arrive(i, gradient);
    storage->keep_local(i);
  }
  struct Arrival {
    size_t parameter;
    double gradient;
  };
  // Runs a backward that reduces. just_touched: a gradient that the backward computes before it
  // reaches an output of the wrapper.
  void pass(const std::vector<Arrival>& arrivals = {},
            std::optional<Arrival> just_touched = {}) const {
    if (just_touched) arrive(just_touched->parameter, just_touched->gradient);
    storage->forget_cleared(just_touched ? std::optional(just_touched->parameter) : std::nullopt);
    storage->begin_pass({});
    for (const auto& [parameter, gradient] : arrivals) arrive(parameter, gradient);
    for (size_t i = 0; i < 2; ++i) {
      if (parameters[i].tensor.grad().defined()) {
        storage->place(i);
      } else {
        storage->place_unused(i);
      }
    }
    while (storage->num_launched() < storage->num_early_buckets()) storage->launch_next();
    storage->trailer().fill_(1);
    storage->finish_early();
    storage->reduce_last();
    for (size_t i = 0; i < 2; ++i) storage->settle_unused(i, {.used_by_some = false});
    storage->end_pass();
  }
  void require_gradient(size_t i, std::optional<double> expected) const {
    const Tensor& gradient = values(i).grad();
    const std::string name = parameters[i].name;
    require(gradient.defined() == expected.has_value(), name + ": defined or not");
    if (!expected) return;
    require(torch::equal(gradient, torch::full_like(gradient, *expected)),
            name + ": " + std::to_string(gradient.numel() > 0 ? gradient[0].item<double>() : 0));
  }

  std::vector<NamedTensor> parameters;
  std::shared_ptr<shard::FlatParameters> unit;
  int rank;
  std::unique_ptr<ShardedGradients> storage;
};

void on_two_ranks(const std::function<void(const ProcessGroup&)>& body) {
  const auto result = run_groups(2, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LocalShardGradients, OfEachParameterGoWithItsOwnShard) {
  for (const bool set_to_none : {true, false}) {
    on_two_ranks([set_to_none](const ProcessGroup& world) {
      const Shards shards(world);
      for (const size_t i : {0, 1}) shards.accumulate(i, 10);
      Tensor values = shards.values(0);
      if (set_to_none) {
        values.mutable_grad().reset();
      } else {
        values.grad().zero_();
      }
      const double own = 2 + 2 * shards.rank;
      shards.pass({{0, own}, {1, own}});
      shards.require_gradient(0, 3);
      shards.require_gradient(1, 13);
    });
  }
}

// The program clears accumulated gradients, and the next backward computes a gradient before it
// reaches an output of the wrapper. The accumulated gradient must be dropped before that.
TEST(LocalShardGradients, AreDroppedBeforeABackwardAddsToThem) {
  on_two_ranks([](const ProcessGroup& world) {
    const Shards shards(world);
    shards.accumulate(0, 10);
    shards.values(0).mutable_grad().reset();
    shards.pass({}, Shards::Arrival{0, 4});
    shards.require_gradient(0, 4);
    shards.require_gradient(1, std::nullopt);
  });
}

TEST(LocalShardGradients, AChangeOfTheShardsGradientIsRefusedInThePass) {
  const std::vector<std::function<void(Tensor&)>> changes = {
      [](Tensor& gradient) { gradient.mul_(1); }, [](Tensor& gradient) { gradient.mul_(0.5); },
      [](Tensor& gradient) { gradient.add_(1); }};
  for (const bool has_earlier : {false, true}) {
    for (const auto& change : changes) {
      on_two_ranks([&](const ProcessGroup& world) {
        const Shards shards(world);
        if (has_earlier) {
          shards.pass({{0, 0}});  // the shard's gradient is zeros
        }
        shards.accumulate(0, 10);
        Tensor gradient = shards.values(0).grad();
        change(gradient);
        // A rank that owns no element of the parameter cannot notice the change.
        if (gradient.numel() == 0) {
          shards.pass();
        } else {
          EXPECT_THAT(failure_of([&] { shards.pass(); }),
                      HasSubstr("the gradient of this rank's shard of \"a\" was changed in place "
                                "after a backward() under no_sync()"));
          shards.storage->abandon();
          shards.storage->settle_abandoned();
        }
        shards.storage->zero_grad(/*set_to_none=*/true);
        shards.pass({{0, 6}});
        shards.require_gradient(0, 6);
      });
    }
  }
}

TEST(LocalShardGradients, GradientsFromBeforeCountUntilTheyAreCleared) {
  for (const bool is_cleared : {false, true}) {
    on_two_ranks([is_cleared](const ProcessGroup& world) {
      const Shards shards(world, torch::full({kNumel}, 5.0));
      if (is_cleared) {
        for (const size_t i : {0, 1}) shards.values(i).mutable_grad().reset();
      }
      shards.pass({{0, 2}, {1, 2}});
      for (const size_t i : {0, 1}) shards.require_gradient(i, is_cleared ? 2 : 7);
    });
  }
}

TEST(LocalShardGradients, WhatAFailedBackwardHasLeftDoesNotCount) {
  on_two_ranks([](const ProcessGroup& world) {
    const Shards shards(world);
    shards.arrive(0, 100);  // the backward throws after these two gradients
    shards.arrive(1, 100);
    shards.pass({{0, 2}, {1, 2}});
    for (const size_t i : {0, 1}) shards.require_gradient(i, 2);
    shards.arrive(0, 100);
    shards.storage->forget_cleared(std::nullopt);
    require(!shards.parameters[0].tensor.grad().defined(), "dropped by the next forward");
  });
}

// A pass has several backwards, as in a pipeline with one for each microbatch. Their gradients must
// add up.
TEST(LocalShardGradients, SeveralBackwardsOfOnePassAddUp) {
  on_two_ranks([](const ProcessGroup& world) {
    const Shards shards(world);
    for (int step = 0; step < 2; ++step) {
      const double own = 2 + 2 * shards.rank;
      shards.pass({{0, own}, {1, 1}, {0, 10}, {0, 20}});
      shards.require_gradient(0, 33);
      shards.require_gradient(1, 1);
      shards.storage->zero_grad(/*set_to_none=*/true);
    }
  });
}

TEST(LocalShardGradients, WhatTheProgramAssignsCounts) {
  on_two_ranks([](const ProcessGroup& world) {
    const Shards shards(world);
    for (int step = 0; step < 2; ++step) {
      Tensor parameter = shards.parameters[0].tensor;
      // autograd::grad() runs the parameter's hooks without adding to its gradient; this must not
      // count as a gradient.
      torch::autograd::grad({parameter}, {parameter}, {torch::ones({kNumel})});
      parameter.mutable_grad() = torch::full({kNumel}, 8.0 * (1 + shards.rank));
      shards.pass();
      shards.require_gradient(0, 12);
      shards.storage->zero_grad(/*set_to_none=*/true);
    }
  });
}

// The program keeps gradients of the first step: the tensor itself, an alias of it, and an empty
// view. Later steps must not change their values.
TEST(LocalShardGradients, AGradientThatTheProgramKeepsStaysAsItIs) {
  for (const bool is_accumulated : {false, true}) {
    on_two_ranks([is_accumulated](const ProcessGroup& world) {
      const Shards shards(world);
      const auto step = [&](double gradient) {
        if (!is_accumulated) return shards.pass({{0, gradient}, {1, gradient}});
        for (const size_t i : {0, 1}) shards.accumulate(i, gradient);
        shards.pass();
      };
      step(1);
      std::vector<Tensor> kept = {shards.values(0).grad(), shards.values(1).grad().detach(),
                                  shards.values(1).grad().narrow(0, 0, 0)};
      shards.storage->zero_grad(/*set_to_none=*/true);
      step(2);
      for (const size_t i : {0, 1}) shards.require_gradient(i, 2);
      for (const Tensor& gradient : kept) {
        require(torch::equal(gradient, torch::ones_like(gradient)), "of the first step");
      }
      kept.clear();
      shards.storage->zero_grad(/*set_to_none=*/true);
      step(3);
      const void* memory = shards.values(0).grad().const_data_ptr();
      for (int k = 0; k < 3; ++k) {
        shards.storage->zero_grad(/*set_to_none=*/true);
        step(4);
        require(shards.values(0).grad().const_data_ptr() == memory, "used again");
      }
      // Now the program clears only one of the two gradients.
      const Tensor first = shards.values(0).grad();
      shards.values(0).mutable_grad().reset();
      step(5);
      require(torch::equal(first, torch::full_like(first, 4)), "kept of one parameter");
      shards.require_gradient(0, 5);
      shards.require_gradient(1, 9);
    });
  }
}

// The program keeps a view of a part of one gradient, which can be noticed only by the reference
// count of the storage. Later steps must not change its values.
TEST(LocalShardGradients, APartOfOneGradientThatTheProgramKeepsStaysAsItIs) {
  for (const size_t kept_of : {0, 1}) {
    for (const bool are_all_cleared : {true, false}) {
      on_two_ranks([kept_of, are_all_cleared](const ProcessGroup& world) {
        const Shards shards(world);
        shards.pass({{0, 1}, {1, 1}});
        double other = 1;
        for (int step = 2; step <= 4; ++step) {
          // The view is made of an alias, because a view of the gradient itself would hold the
          // gradient's tensor.
          const Tensor alias = shards.values(kept_of).grad().detach();
          const Tensor kept = alias.narrow(0, 0, alias.numel() / 2);
          if (are_all_cleared) shards.storage->zero_grad(/*set_to_none=*/true);
          shards.values(kept_of).mutable_grad().reset();
          const double value = step;
          shards.pass({{0, value}, {1, value}});
          require(torch::equal(kept, torch::full_like(kept, step - 1)), "kept");
          other = are_all_cleared ? value : other + value;
          shards.require_gradient(kept_of, value);
          shards.require_gradient(1 - kept_of, other);
        }
      });
    }
  }
}

// Parameter 1 has a gradient from before and is used in no pass. Its gradient must stay, and
// destroying the storage must work.
TEST(LocalShardGradients, EndWithAGradientThatIsNoRefusedOne) {
  on_two_ranks([](const ProcessGroup& world) {
    {
      Shards shards(world, torch::full({kNumel}, 5.0));
      shards.storage->begin_pass({});
      shards.arrive(0, 1);
      shards.storage->place(0);
      shards.storage->place_unused(1);
      shards.storage->launch_next();
      shards.storage->trailer().fill_(1);
      shards.storage->finish_early();
      shards.storage->reduce_last();
      shards.storage->settle_unused(1, {.used_by_some = false});
      shards.storage->end_pass();
      require(shards.parameters[1].tensor.grad().defined(), "it stays");
    }
  });
}

}  // namespace
}  // namespace cadre
