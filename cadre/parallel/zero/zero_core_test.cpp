// Tests that steps, snapshots and comparisons between the ranks all use the options in
// param_groups(). Also tests that the parameters can be used after the destruction of the
// optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"
#include "cadre/testing/torch/zero_net.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using torch::optim::SGDOptions;
using zero_net::Groups;
using zero_net::groups_of;
using zero_net::kManyBuckets;
using zero_net::Net;
using zero_net::options;
using zero_net::require_same;
using zero_net::train_step;

template <typename Optimizer>
void copy_through_archive(const Optimizer& from, Optimizer& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

TEST(ZeroSettings, ALoadedOptimizerStepsWithTheLoadedOptions) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net plain_net;
    Net net;
    SGD plain(plain_net.parameters(), SGDOptions(0.001).momentum(0.5));
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group,
                                      SGDOptions(0.001).momentum(0.5));
    for (Net* each : {&plain_net, &net}) {
      torch::optim::Optimizer& optimizer =
          each == &net ? static_cast<torch::optim::Optimizer&>(zero) : plain;
      train_step(*each, group, optimizer, 0);
      // This learning rate is set after the last step, and must be in the archive.
      optimizer.param_groups()[0].options().set_lr(0.01);
    }
    SGD plain_loaded(plain_net.parameters(), SGDOptions(0.1));
    ZeroRedundancyOptimizer<SGD> loaded(net.named_parameters(), group, SGDOptions(0.1));
    copy_through_archive(plain, plain_loaded);
    copy_through_archive(zero, loaded);
    require(loaded.param_groups()[0].options().get_lr() == 0.01, "the options of the groups");
    require(loaded.local_optimizer().param_groups()[0].options().get_lr() == 0.01, "of the parts");
    for (int step = 1; step < 4; ++step) {
      train_step(plain_net, group, plain_loaded, step);
      train_step(net, group, loaded, step);
      require_same(net, plain_net, "step " + std::to_string(step));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The learning rate of an added group is set to the default of its class. It must be used, although
// torch::optim::Optimizer ignores options that equal the defaults of their class.
TEST(ZeroSettings, AGroupThatIsAddedKeepsWhatIsSetLater) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net plain_net;
    Net net;
    const auto all = [](const Net& of) { return groups_of(of); };
    AdamW plain(Groups{all(plain_net)[0]}, options());
    ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, Groups{all(net)[0]},
                                        options());
    for (torch::optim::Optimizer* each :
         std::initializer_list<torch::optim::Optimizer*>{&plain, &zero}) {
      each->add_param_group(all(each == &plain ? plain_net : net)[1]);
      each->param_groups()[1].options().set_lr(torch::optim::AdamWOptions().lr());
    }
    train_step(plain_net, group, plain, 0);
    train_step(net, group, zero, 0);
    require_same(net, plain_net, "the class's learning rate");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Adadelta merges the options of a group with its defaults in its own way, which the ZeRO optimizer
// must keep.
TEST(ZeroSettings, GroupsOfAdadeltaKeepTheirOptions) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto with = [](const torch::optim::OptimizerParamGroup& given, double rho) {
      return torch::optim::OptimizerParamGroup(
          given.params(), std::make_unique<AdadeltaOptions>(AdadeltaOptions(0.5).rho(rho)));
    };
    Net plain_net;
    Net net;
    Adadelta plain(Groups{with(groups_of(plain_net)[0], 0.7)}, AdadeltaOptions(0.25));
    ZeroRedundancyOptimizer<Adadelta> zero(
        net.named_parameters(), group, Groups{with(groups_of(net)[0], 0.7)}, AdadeltaOptions(0.25));
    plain.add_param_group(with(groups_of(plain_net)[1], 0.6));
    zero.add_param_group(with(groups_of(net)[1], 0.6));
    for (const size_t i : {0, 1}) {
      const double rho =
          static_cast<const AdadeltaOptions&>(zero.param_groups()[i].options()).rho();
      require(rho == (i == 0 ? 0.7 : 0.6), "the options of group " + std::to_string(i));
    }
    for (int step = 0; step < 3; ++step) {
      train_step(plain_net, group, plain, step);
      train_step(net, group, zero, step);
      require_same(net, plain_net, "step " + std::to_string(step));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ZeroSettings, AGroupWithOptionsOfAnotherOptimizerIsNotAdded) {
  const ProcessGroup alone = init_process_group();
  Net net;
  ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), alone, Groups{groups_of(net)[0]},
                                      options());
  const torch::optim::OptimizerParamGroup other(groups_of(net)[1].params(),
                                                std::make_unique<torch::optim::AdamOptions>(0.5));
  EXPECT_THAT(failure_of([&] { zero.add_param_group(other); }),
              HasSubstr("parameter group 1 has the options of another optimizer"));
  EXPECT_EQ(zero.param_groups().size(), 1U);
  EXPECT_EQ(zero.local_optimizer().param_groups().size(), 1U);
}

// Calls make(), which constructs an optimizer with a difference on rank 1, and returns the error,
// which must be the same on both ranks.
std::string refusal_of(const std::function<void(const ProcessGroup&, Net&)>& make) {
  return testing::refusal_of_both_ranks(
      [](const ProcessGroup&) { return std::make_shared<Net>(); },
      [&](const std::shared_ptr<Net>& net, const ProcessGroup& group) { make(group, *net); });
}

TEST(ZeroSettings, GroupsThatDifferBetweenTheRanksAreRefused) {
  using Zero = ZeroRedundancyOptimizer<AdamW>;
  EXPECT_THAT(refusal_of([](const ProcessGroup& group, Net& net) {
                Groups groups = groups_of(net);
                if (group.rank() == 1) std::swap(groups[0], groups[1]);
                Zero(net.named_parameters(), group, groups, options());
              }),
              HasSubstr("the number of parameters of group 0 is 3 on rank 0 and 5 on rank 1"));
  EXPECT_THAT(refusal_of([](const ProcessGroup& group, Net& net) {
                Groups groups = groups_of(net);
                if (group.rank() == 1) std::swap(groups[0].params()[0], groups[0].params()[1]);
                Zero(net.named_parameters(), group, groups, options());
              }),
              HasSubstr("parameter 0 of group 0 is \"in.weight\" on rank 0 and \"out.weight\" on "
                        "rank 1; give all ranks the same parameter groups"));
  EXPECT_THAT(
      refusal_of([](const ProcessGroup& group, Net& net) {
        Zero(net.named_parameters(), group, options().weight_decay(group.rank() == 1 ? 0.2 : 0.1));
      }),
      AllOf(HasSubstr("the set of options of group 0 is (lr 0.01, betas 0.9 and 0.999, eps 1e-08, "
                      "weight decay 0.1, amsgrad false) on rank 0"),
            HasSubstr("weight decay 0.2, amsgrad false) on rank 1")));
  EXPECT_THAT(refusal_of([](const ProcessGroup& group, Net& net) {
                Zero(net.named_parameters(), group, options(),
                     {.bucket_cap_bytes = group.rank() == 1 ? 100 : 200});
              }),
              HasSubstr("bucket_cap_bytes is 200 on rank 0 and 100 on rank 1"));
}

// The second group has a parameter of another model, on rank 1 (1) or on both ranks (2). The
// constructor must throw and must not have moved the parameters of the first group.
TEST(ZeroSettings, ARefusedConstructorChangesNothing) {
  for (const int refusing : {1, 2}) {
    const std::string refusal = refusal_of([refusing](const ProcessGroup& group, Net& net) {
      Net other;
      Groups groups = groups_of(net);
      if (refusing == 2 || group.rank() == refusing) groups[1].params()[0] = other.in->weight;
      ZeroRedundancyOptimizer<AdamW>(net.named_parameters(), group, groups, options());
    });
    EXPECT_THAT(refusal, HasSubstr("none of the 8 parameters that the optimizer was made for"));
    if (refusing == 1) {
      EXPECT_THAT(refusal, HasSubstr("on rank 1 of 2"));
    }
  }
}

// Two parameters share memory. With the first cap they would be moved into one buffer, with the
// second cap into two; in both cases the constructor must throw.
TEST(ZeroSettings, ATieByMemoryIsRefused) {
  for (const int64_t cap : {int64_t{1} << 20, int64_t{100}}) {
    EXPECT_THAT(refusal_of([cap](const ProcessGroup& group, Net& net) {
                  net.out->bias.set_data(net.in->weight.detach().select(0, 2));
                  ZeroRedundancyOptimizer<SGD>(net.named_parameters(), group, SGDOptions(0.1),
                                               {.bucket_cap_bytes = cap});
                }),
                AllOf(HasSubstr("\"in.weight\" and \"out.bias\" share memory"),
                      HasSubstr("register one tensor under both names")));
  }
  EXPECT_THAT(refusal_of([](const ProcessGroup& group, Net& net) {
                net.frozen.set_data(net.in->bias.detach());
                ZeroRedundancyOptimizer<SGD>(net.named_parameters(), group, SGDOptions(0.1));
              }),
              HasSubstr("share memory"));
}

TEST(ZeroSettings, OptionsThatDifferInAStepAreRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, SGDOptions(0.1));
    train_step(net, group, zero, 0);
    if (group.rank() == 1) zero.param_groups()[0].options().set_lr(0.2);
    output = failure_of([&] { zero.step(); });
    if (group.rank() == 1) zero.param_groups()[0].options().set_lr(0.1);
    zero.step();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("the set of options of group 0 is (lr 0.1,"),
                                   HasSubstr("(lr 0.2,"), HasSubstr("on rank 1")));
  }
}

TEST(ZeroSettings, StatesThatDifferInAStepAreRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, options());
    for (int step = 0; step < 2; ++step) train_step(net, group, zero, step);
    for (auto& [leaf, state] : zero.local_optimizer().state()) {
      auto& adam = static_cast<torch::optim::AdamWParamState&>(*state);
      if (group.rank() == 1) adam.step(adam.step() - 1);
    }
    output = failure_of([&] { zero.step(); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("is that of step 2, with 2 tensors on rank 0"),
                                   HasSubstr("that of step 1, with 2 tensors on rank 1"),
                                   HasSubstr("load the same state on all of them")));
  }
}

TEST(ZeroSettings, WhatOneRankCannotStepIsRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, SGDOptions(0.1));
    train_step(net, group, zero, 0);
    if (group.rank() == 1) net.in->weight.set_data(torch::zeros({7, 5}));
    output = failure_of([&] { zero.step(); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("\"in.weight\" has been given other memory"),
                                   HasSubstr("on rank 1 of 2")));
  }
}

TEST(ZeroSettings, AStateThatLacksATensorIsRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, options());
    train_step(net, group, zero, 0);
    std::vector<ParameterState> states = zero.state_dict();
    if (group.rank() == 1) states[0].tensors.erase(states[0].tensors.begin());
    output = failure_of([&] { zero.load_state_dict(states); });
    zero.load_state_dict(zero.state_dict());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("has no \"exp_avg\""), HasSubstr("on rank 1 of 2")));
  }
}

// The optimizer is destroyed directly after a step that has not waited. The parameters must have
// the new values, although ParameterShards still exist.
TEST(ZeroSettings, ParametersAreThereAfterAnOptimizerThatDidNotWait) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net plain_net;
    Net net;
    SGD plain(plain_net.parameters(), SGDOptions(0.1));
    std::vector<ParameterShard> shards;
    {
      ZeroOptions no_wait = kManyBuckets;
      no_wait.wait_in_step = false;
      ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, SGDOptions(0.1), no_wait);
      train_step(net, group, zero, 0);
      shards = zero.parameter_shards();
    }
    train_step(plain_net, group, plain, 0);
    require_same(net, plain_net, "after the optimizer");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ZeroSettings, OneThatWasMovedFromSaysSo) {
  const ProcessGroup alone = init_process_group();
  Net net;
  ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), alone, SGDOptions(0.1));
  ZeroRedundancyOptimizer<SGD> other = std::move(zero);
  const auto refuses = [](const auto& call) {
    EXPECT_THAT(failure_of(call), HasSubstr("this optimizer was moved from"));
  };
  refuses([&] { zero.step(); });  // NOLINT: tests the use after the move
  refuses([&] { zero.wait(); });
  refuses([&] { static_cast<void>(zero.stage()); });
  refuses([&] { static_cast<void>(zero.local_optimizer()); });
  refuses([&] { static_cast<void>(zero.parameter_shards()); });
  refuses([&] { static_cast<void>(zero.state_dict()); });
  refuses([&] { zero.load_state_dict({}); });
  refuses([&] { zero.add_param_group(other.param_groups()[0]); });
  other.step();
}

}  // namespace
}  // namespace cadre
