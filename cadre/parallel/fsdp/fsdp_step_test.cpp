// Tests which differences between the ranks a ShardedOptimizer reports before each step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AllOf;
using ::testing::HasSubstr;

Tensor rows_of_rank(int rank, int step) {
  return torch::linspace(-1, 1, 36, kDouble).view({3, 12}) * (1 + rank) + 0.1 * step;
}

struct SteppedModel {
  using Options = FullyShardedDataParallelOptions;

  explicit SteppedModel(const ProcessGroup& of, ShardForm form = ShardForm::kGathered)
      : SteppedModel(of, of, form) {}
  // ranks: the process group, or a mesh of its ranks.
  template <typename Ranks>
  SteppedModel(const ProcessGroup& of, const Ranks& ranks, ShardForm form)
      : group(of),
        module([] {
          auto made = std::make_shared<UnitMlp>();
          made->to(kDouble);
          set_values(*made);
          return made;
        }()),
        model(module, ranks, Options{.form = form, .wrap_policy = wrap_shard_units()}),
        optimizer(model, torch::optim::AdamWOptions(0.01)) {}

  void backward(int step) { model(rows_of_rank(group.rank(), step)).pow(2).mean().backward(); }
  void train(int step) {
    optimizer.zero_grad();
    backward(step);
    optimizer.step();
  }
  std::vector<Tensor> shards() const {
    std::vector<Tensor> copies;
    for (const Tensor& shard : model.parameters()) copies.push_back(shard.detach().clone());
    return copies;
  }

  const ProcessGroup& group;
  std::shared_ptr<UnitMlp> module;
  FullyShardedDataParallel<UnitMlp> model;
  ShardedOptimizer<AdamW> optimizer;
};

// Trains two steps and then calls `prepare`, which causes a difference between the ranks. The third
// step must throw an error with the texts `expected` on all ranks, and write no shard.
void expect_refused(const std::function<void(SteppedModel&)>& prepare,
                    const std::vector<std::string>& expected) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      SteppedModel training(group, form);
      training.train(0);
      training.train(1);
      training.optimizer.zero_grad();
      training.backward(2);
      const std::vector<Tensor> before = training.shards();
      prepare(training);
      output = failure_of([&] { training.optimizer.step(); });
      const std::vector<Tensor> after = training.shards();
      for (size_t i = 0; i < before.size(); ++i) {
        require(torch::equal(before[i], after[i]), "nothing was written");
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      for (const std::string& part : expected) EXPECT_THAT(rank.output, HasSubstr(part));
    }
  }
}

TEST(FsdpStep, ALearningRateOfOneRankIsRefused) {
  expect_refused(
      [](SteppedModel& training) {
        if (training.group.rank() == 1) training.optimizer.param_groups()[0].options().set_lr(0.5);
      },
      {"the set of options of group 0 is (lr 0.01,", "(lr 0.5,", "on rank 1",
       "give all ranks the same groups with the same options"});
}

TEST(FsdpStep, AGroupOfOneRankIsRefused) {
  expect_refused(
      [](SteppedModel& training) {
        auto& groups = training.optimizer.param_groups();
        if (training.group.rank() == 1) groups[0].params().pop_back();
      },
      {"the number of parameters of group 0 is 6 on rank 0 and 5 on rank 1"});
}

TEST(FsdpStep, AStateThatOneRankHasLostIsRefused) {
  expect_refused(
      [](SteppedModel& training) {
        if (training.group.rank() == 1) training.optimizer.state().clear();
      },
      {"is that of step 2, with 2 tensors on rank 0 and none on rank 1"});
}

TEST(FsdpStep, AGradientOfOneRankThatWaitsIsRefused) {
  expect_refused(
      [](SteppedModel& training) {
        {
          const auto no_sync = training.model.no_sync();
          training.backward(3);
        }
        if (training.group.rank() == 0) training.optimizer.zero_grad();
      },
      {"has a gradient that was not reduced yet", "on rank 1 of 2", "or call reduce_gradients()"});
}

TEST(FsdpStep, AShardOfAnotherWrapperIsRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    SteppedModel first(group);
    SteppedModel second(group);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(first.model.parameters());
    groups.emplace_back(second.model.parameters());
    ShardedOptimizer<AdamW> both(first.model, groups, torch::optim::AdamWOptions(0.01));
    first.backward(0);
    second.backward(0);
    output = failure_of([&] { both.step(); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(
        rank.output,
        HasSubstr("belongs to another wrapper than the one with which the optimizer was made"));
  }
}

TEST(FsdpStep, OtherMemoryOfAShardIsRefused) {
  expect_refused(
      [](SteppedModel& training) {
        const Tensor shard = training.model.parameters().front();
        if (training.group.rank() == 1) at::Tensor(shard).set_data(shard.detach().clone());
      },
      {"has been given other memory", "on rank 1 of 2"});
}

TEST(FsdpStep, AShardThatIsFrozenOrUnfrozenIsRefused) {
  for (const bool is_frozen : {false, true}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      auto net = std::make_shared<UnitMlp>();
      net->to(kDouble);
      set_values(*net);
      net->parameters().front().set_requires_grad(!is_frozen);
      FullyShardedDataParallel<UnitMlp> model{net, group, {.wrap_policy = wrap_shard_units()}};
      model(rows_of_rank(0, 0)).pow(2).mean().backward();
      Tensor shard = model.parameters().front();
      shard.set_requires_grad(is_frozen);
      output = failure_of([&] { model(rows_of_rank(0, 0)); });
      shard.set_requires_grad(!is_frozen);
      model(rows_of_rank(0, 0)).pow(2).mean().backward();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output, AllOf(HasSubstr("requires_grad of this rank's shard of \""),
                                     HasSubstr("the parameter of the module instead")));
    }
  }
}

// All ranks run a backward under no_sync(), and all but rank 1 clear the gradients. The functions
// that read gradients must throw on all ranks, because those of rank 1 are not reduced yet.
TEST(FsdpStep, NormsAndChecksOfGradientsThatWaitAreRefused) {
  const std::vector<std::pair<std::string, std::function<void(SteppedModel&)>>> readers = {
      {"clip_grad_norm_", [](SteppedModel& t) { clip_grad_norm_(t.model, 1e9); }},
      {"gradient_norm", [](SteppedModel& t) { gradient_norm(t.model.parameter_shards()); }},
      {"check_gradients_finite",
       [](SteppedModel& t) { check_gradients_finite(t.model.parameter_shards(), {}); }},
      {"unscale_", [](SteppedModel& t) { GradScaler().unscale_(t.model.parameter_shards()); }},
      {"gather_gradients",
       [](SteppedModel& t) { shard::gather_gradients(t.model.parameter_shards(), t.group); }}};
  const auto expect_refusals = [&](SteppedModel& training) {
    {
      const auto no_sync = training.model.no_sync();
      training.backward(0);
    }
    if (training.group.rank() != 1) training.optimizer.zero_grad();
    for (const auto& [name, read] : readers) {
      EXPECT_THAT(failure_of([&, &read = read] { read(training); }),
                  HasSubstr("has a gradient that was not reduced yet"))
          << name;
    }
    training.optimizer.zero_grad();
    training.backward(1);
    for (const auto& [name, read] : readers) read(training);
  };
  for (const bool has_replicas : {false, true}) {
    const auto result = run_groups(has_replicas ? 4 : 2, [&](const ProcessGroup& group) {
      if (has_replicas) {
        SteppedModel training(group, DeviceMesh(group, {{"replicate", 2}, {"shard", 2}}),
                              ShardForm::kGathered);
        expect_refusals(training);
      } else {
        SteppedModel training(group);
        expect_refusals(training);
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Only rank 1's optimizer has a second group, with a tensor that is not a shard. This difference is
// allowed.
TEST(FsdpStep, TensorsThatAreNoShardsAreNotCompared) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    SteppedModel training(group);
    const Tensor own = torch::ones({2 + group.rank()}, torch::requires_grad());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(training.model.parameters());
    if (group.rank() == 1) groups.emplace_back(std::vector<Tensor>{own});
    ShardedOptimizer<AdamW> optimizer(training.model, groups, torch::optim::AdamWOptions(0.01));
    training.backward(0);
    own.sum().backward();
    optimizer.step();
    require((own[0].item<float>() != 1) == (group.rank() == 1), "its optimizer steps it");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program drops a batch: it clears gradients that were accumulated under no_sync(). A step is
// then allowed.
TEST(FsdpStep, AStepAfterADroppedBatchIsNoMistake) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    SteppedModel training(group);
    training.train(0);
    for (const bool to_none : {true, false}) {
      {
        const auto no_sync = training.model.no_sync();
        training.backward(1);
      }
      training.optimizer.zero_grad(to_none);
      training.optimizer.step();
    }
    training.train(2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

struct Row : nn::Module {
  Row() { v = register_parameter("v", torch::linspace(-1, 1, 64, kDouble)); }
  Tensor forward(const Tensor& x) { return (x * v).pow(2).sum(); }
  Tensor v;
};

// Both ranks own 32 elements, so an archive of rank 0 would fit on rank 1. The archive contains the
// rank, and loading it on rank 1 must throw on all ranks.
TEST(FsdpStep, AnArchiveOfAnotherRankIsRefusedOnAllRanks) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      FullyShardedDataParallel<Row> model{std::make_shared<Row>(), group, {.form = form}};
      ShardedOptimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
      const auto train = [&](int step) {
        optimizer.zero_grad();
        model(torch::arange(64, kDouble).add(step).sin()).backward();
        optimizer.step();
      };
      const auto load = [&](const std::string& bytes) {
        torch::serialize::InputArchive archive;
        archive.load_from(bytes.data(), bytes.size());
        optimizer.load(archive);
      };
      train(0);
      const std::vector<std::string> archives = gather_texts(group, "test", [&] {
        std::ostringstream stream;
        torch::save(static_cast<const torch::optim::Optimizer&>(optimizer), stream);
        return stream.str();
      });
      const Tensor shard = model.parameters()[0];
      const Tensor before = shard.detach().clone();
      train(1);
      const Tensor after = shard.detach().clone();
      output = failure_of([&] { load(archives[0]); });
      train(2);  // the failed load has not changed the state of any rank
      // Each rank loads its own archive, which was saved after the first step, and repeats the
      // second step.
      load(archives[static_cast<size_t>(group.rank())]);
      {
        const torch::NoGradGuard no_grad;
        ShardUpdate update{model};
        shard.copy_(before);
        update.finish();
      }
      train(1);
      require(torch::equal(shard, after), "the step from the loaded state");
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output,
                  AllOf(HasSubstr("cadre::ShardedOptimizer: the archive has the state of the "
                                  "shards of rank 0 of 2; expected those of rank 1 of 2"),
                        HasSubstr("save_sharded()")));
    }
  }
}

}  // namespace
}  // namespace cadre
