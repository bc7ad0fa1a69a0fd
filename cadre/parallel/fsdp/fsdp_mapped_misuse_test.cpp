// Tests that misuse is an error with mapped shards, or with both forms of shards: the texts of the
// errors, and that no rank continues with wrong values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// A model that is so large that each of two ranks owns elements of each unit, also if shards are
// whole pages.
struct Wide : nn::Module {
  static constexpr int64_t kSide = 64;
  Wide() {
    unit = register_module("unit", LinearUnit(kSide, kSide));
    head = register_module("head", nn::Linear(kSide, kSide));
    to(kDouble);
    set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::tanh(unit->forward(x));
    if (inside) inside();
    return head(h);
  }
  LinearUnit unit{nullptr};
  nn::Linear head{nullptr};
  std::function<void()> inside;
};

Tensor wide_rows(int step) {
  return torch::sin(torch::arange(4 * Wide::kSide, kDouble) + step).view({4, Wide::kSide});
}

FullyShardedDataParallelOptions in_form(ShardForm form) {
  return {.form = form, .wrap_policy = wrap_shard_units()};
}

struct WideRank {
  WideRank(const ProcessGroup& of, ShardForm form)
      : group(of), model(module, group, in_form(form)), optimizer(model, 0.1) {}

  void backward() {
    optimizer.zero_grad();
    model(wide_rows(group.rank())).pow(2).mean().backward();
  }
  void step() {
    backward();
    optimizer.step();
  }

  const ProcessGroup& group;
  std::shared_ptr<Wide> module = std::make_shared<Wide>();
  FullyShardedDataParallel<Wide> model;
  ShardedOptimizer<torch::optim::SGD> optimizer;
};

void on_both_forms(int world_size, const std::function<void(WideRank&)>& body) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    SCOPED_TRACE(form == ShardForm::kMapped ? "mapped" : "gathered");
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      WideRank rank(group, form);
      EXPECT_EQ(rank.model.form(), form);
      body(rank);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

template <typename Function>
std::string sentence_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(FsdpMappedMisuse, AnOptimizerThatKnowsNoUpdates) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    WideRank rank(group, ShardForm::kMapped);
    torch::optim::AdamW plain(rank.model.parameters(), 0.1);
    rank.backward();
    const Snapshot before = assembled_parameters(rank.model, group);
    EXPECT_THAT(sentence_of([&] { plain.step(); }),
                AllOf(HasSubstr("mapped shards are written by Cadre's own step only"),
                      HasSubstr("cadre::ShardedOptimizer<cadre::AdamW>{model, options}")));
    const Snapshot after = assembled_parameters(rank.model, group);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i]));
    rank.optimizer.step();
    rank.step();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Operations may read a parameter everywhere. Its memory is accessible only to them.
TEST(FsdpMappedMisuse, AParameterIsTouchedOutsideOfItsForward) {
  on_both_forms(2, [](WideRank& rank) {
    const Tensor& weight = rank.module->unit->weight;
    const auto memory = [&] { return sentence_of([&] { weight.const_data_ptr<double>(); }); };
    const std::string sentence = "of unit \"unit\" of FullyShardedDataParallel are sharded";
    EXPECT_THAT(memory(), HasSubstr(sentence));
    rank.module->inside = [&] { EXPECT_THAT(memory(), HasSubstr(sentence)) << "in the forward"; };
    rank.step();
    rank.module->inside = nullptr;
    EXPECT_THAT(memory(), HasSubstr(sentence)) << "after the step";
    const auto whole = assembled_parameters(rank.model, rank.group);
    EXPECT_TRUE(torch::equal(weight.clone(), whole[0]));
    {
      const torch::NoGradGuard no_grad;
      EXPECT_THAT(sentence_of([&] { weight.zero_(); }),
                  HasSubstr("writes to the parameters of unit \"unit\", which are sharded"));
    }
    EXPECT_TRUE(torch::equal(weight.clone(), whole[0])) << "nothing was written";
    rank.step();
  });
}

TEST(FsdpMappedMisuse, AForwardWritesToAParameter) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    WideRank rank(group, ShardForm::kMapped);
    rank.step();
    rank.module->inside = [&] { rank.module->head->bias.zero_(); };
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(error_of([&] { rank.model(wide_rows(0)); }, ErrorCode::kCorruption),
                AllOf(HasSubstr("of the root unit of FullyShardedDataParallel, rank "),
                      HasSubstr("hold summon_full_params() and write back")));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 leaves out a step of the optimizer. This must be found after 0, 1 or 3 correct steps; in
// the first step there is no earlier order of calls to compare with.
TEST(FsdpMappedMisuse, OneRankLeavesOutAStep) {
  for (const int num_good : {0, 1, 3}) {
    on_both_forms(2, [num_good](WideRank& rank) {
      for (int i = 0; i < num_good; ++i) rank.step();
      rank.backward();
      const std::string failure = sentence_of([&] {
        if (rank.group.rank() == 0) rank.optimizer.step();
        rank.step();
      });
      EXPECT_THAT(
          failure,
          AnyOf(HasSubstr("the ranks have updated their shards at different times: since "
                          "the wrapper was made rank 0 1 times, rank 1 0 times. Call "
                          "step() of the optimizer on all ranks or on none"),
                HasSubstr("One of them has left out or repeated a forward, a backward() or another "
                          "call that all ranks make (for example after it caught an exception)")));
    });
  }
}

// Only one of two replicas makes the step. Without an error their shards, which must be equal,
// would differ from then on.
TEST(FsdpMappedMisuse, OneReplicaLeavesOutAStep) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {{"replicate", 2}, {"shard", 1}});
      FullyShardedDataParallel model{std::make_shared<Wide>(), mesh, in_form(form)};
      ShardedOptimizer<torch::optim::SGD> optimizer{model, 0.1};
      model(wide_rows(group.rank())).pow(2).mean().backward();
      const auto misuse = [&] {
        if (group.rank() == 0) optimizer.step();
        model(wide_rows(0));
      };
      EXPECT_THAT(
          error_of(misuse, ErrorCode::kInvalidArgument),
          HasSubstr("One of them has left out or repeated a forward, a backward() or another call "
                    "that all ranks make (for example after it caught an exception)"));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Additional backwards, skipped steps and evaluations are no misuse if all ranks do the same.
TEST(FsdpMappedMisuse, NothingWhereAllRanksChangeTheOrder) {
  on_both_forms(2, [](WideRank& rank) {
    for (int i = 0; i < 8; ++i) {
      rank.backward();
      if (i % 3 == 1) rank.model(wide_rows(1)).pow(2).mean().backward();
      if (i % 4 != 2) rank.optimizer.step();
      if (i % 4 == 3) {
        const torch::NoGradGuard no_grad;
        rank.model(wide_rows(0));
      }
    }
  });
}

// The program halves the shards between forward and backward. The backward must throw, because the
// graph was recorded with the old values.
TEST(FsdpMappedMisuse, ShardsChangeBetweenForwardAndBackward) {
  for (const int world_size : {1, 2}) {
    for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterBackward}) {
      for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
        // Here each rank's own buffer still has the old values, so the backward is correct and does
        // not throw.
        if (world_size > 1 && reshard == Reshard::kAfterBackward && form == ShardForm::kGathered)
          continue;
        const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
          FullyShardedDataParallelOptions options = in_form(form);
          options.reshard = options.reshard_root = reshard;
          FullyShardedDataParallel model{std::make_shared<Wide>(), group, options};
          const Tensor loss = model(wide_rows(0).requires_grad_(true)).pow(2).mean();
          {
            const torch::NoGradGuard no_grad;
            std::optional<ShardUpdate> update;
            if (form == ShardForm::kMapped) update.emplace(model);
            for (const Tensor& values : model.parameters()) values.mul_(0.5);
            if (update) update->finish();
          }
          EXPECT_THAT(sentence_of([&] { loss.backward(); }), HasSubstr("inplace operation"))
              << world_size << " ranks";
        });
        EXPECT_TRUE(result.ok()) << result.failures();
      }
    }
  }
}

TEST(FsdpMappedMisuse, RanksChooseOtherForms) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const ShardForm form = group.rank() == 0 ? ShardForm::kGathered : ShardForm::kMapped;
    EXPECT_THAT(error_of([&] { WideRank(group, form); }, ErrorCode::kInvalidArgument),
                HasSubstr("options.form is kGathered on rank 0 and kMapped on rank 1"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
