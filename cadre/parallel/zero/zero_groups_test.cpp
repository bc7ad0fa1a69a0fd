// Tests that the parameter groups and schedulers of a ZeRO optimizer behave as those of the plain
// optimizer.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/zero_net.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;
using zero_net::Groups;
using zero_net::groups_of;
using zero_net::kManyBuckets;
using zero_net::Net;
using zero_net::options;
using zero_net::require_same;
using zero_net::train_step;

// Groups are chosen by the parameters' number of dims, and a scheduler changes their learning
// rates. The results must equal those of the plain optimizer.
TEST(ZeroGroups, HasGroupsAndSchedulersOfAPlainOptimizer) {
  for (const int world_size : {1, 3, 4}) {
    const auto result = run_groups(world_size, [](const ProcessGroup& group) {
      Net plain_net;
      Net net;
      AdamW plain(groups_of(plain_net), options());
      ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, groups_of(net), options(),
                                          kManyBuckets);
      require(zero.stage() == ZeroStage::kReplicatedGradients, "stage 1");
      require(zero.param_groups()[0].params()[0].is_same(net.in->weight), "the plain parameters");
      torch::optim::StepLR plain_schedule(plain, 2, 0.5);
      torch::optim::StepLR schedule(zero, 2, 0.5);
      for (int step = 0; step < 7; ++step) {
        train_step(plain_net, group, plain, step);
        train_step(net, group, zero, step);
        plain_schedule.step();
        schedule.step();
        require_same(net, plain_net, "step " + std::to_string(step));
      }
      require(zero.param_groups()[1].options().get_lr() < 0.0003, "a learning rate of its own");
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

TEST(ZeroGroups, TakesGroupsThatAreAddedLater) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    Net plain_net;
    Net net;
    const auto all = [](Net& of) { return groups_of(of); };
    AdamW plain(Groups{all(plain_net)[0]}, options());
    ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, Groups{all(net)[0]},
                                        options());
    ZeroRedundancyOptimizer<AdamW> other_zero(Net().named_parameters(), group, options());
    train_step(plain_net, group, plain, 0);
    train_step(net, group, zero, 0);
    plain.add_param_group(all(plain_net)[1]);
    zero.add_param_group(all(net)[1]);
    for (const int step : {1, 2}) {
      train_step(plain_net, group, plain, step);
      train_step(net, group, zero, step);
    }
    require_same(net, plain_net, "added");
    // Adds the group by a call through the base class torch::optim::Optimizer.
    Net plain_late_net;
    Net late_net;
    AdamW plain_late(Groups{all(plain_late_net)[0]}, options());
    ZeroRedundancyOptimizer<AdamW> late(late_net.named_parameters(), group,
                                        Groups{all(late_net)[0]}, options());
    plain_late.add_param_group(all(plain_late_net)[1]);
    static_cast<torch::optim::Optimizer&>(late).add_param_group(all(late_net)[1]);
    for (const int step : {0, 1}) {
      train_step(plain_late_net, group, plain_late, step);
      train_step(late_net, group, late, step);
    }
    require_same(late_net, plain_late_net, "added through the base");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program removes a group before the second step, or swaps the parameters of two groups of
// equal size. The results must equal those of the plain optimizer.
TEST(ZeroGroups, FollowsWhatTheProgramDoesToItsGroups) {
  using torch::optim::SGDOptions;
  const std::vector<std::function<void(Groups&)>> changes = {
      [](Groups& groups) { groups.pop_back(); },
      [](Groups& groups) { groups.erase(groups.begin()); },
      [](Groups& groups) { std::swap(groups[0].params(), groups[1].params()); }};
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    for (size_t i = 0; i < changes.size(); ++i) {
      const auto groups_of_two = [](const Net& net) {
        return Groups{{net.in->parameters(), std::make_unique<SGDOptions>(0.1)},
                      {net.out->parameters(), std::make_unique<SGDOptions>(0.5)}};
      };
      Net plain_net;
      Net net;
      SGD plain(groups_of_two(plain_net), SGDOptions(0.1));
      ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, groups_of_two(net),
                                        SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        for (Groups* groups : {&plain.param_groups(), &zero.param_groups()}) {
          if (step == 1) changes[i](*groups);
        }
        train_step(plain_net, group, plain, step);
        train_step(net, group, zero, step);
        require_same(net, plain_net, "change " + std::to_string(i));
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
