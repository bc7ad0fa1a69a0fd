// Tests when mapped shards may be read and when they may be written, and which errors an access at
// another time throws.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shard_training.h"

namespace cadre {
namespace {

using testing::bits_equal;
using testing::failure_of;
using testing::mapped;
using testing::parameter_of;
using testing::require;
using testing::require_in;
using testing::run_groups;
using testing::ShardedTraining;
using testing::ShardedTrainingOptions;
using torch::Tensor;

TEST(ShardFence, ThrowTheSameSentencesAsGatheredOnesWhereTheyAreNotThere) {
  std::vector<std::string> sentences[2];
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const Tensor weight = parameter_of(torch::ones({40, 30}));
      shard::FlatParameters flat({{"weight", weight}}, group, {.form = form});
      std::vector<std::string> texts;
      const auto touch = [&] {
        const std::string failure = failure_of([&] { weight.sum(); });
        require(!failure.empty(), "touching it throws");
        texts.push_back(failure.substr(0, failure.find(".\n")));
      };
      touch();
      texts.push_back(failure_of([&] { flat.wait_unsharded(); }));
      flat.unshard_async();
      touch();
      flat.wait_unsharded();
      weight.sum();
      flat.mark_stale();
      touch();
      flat.reshard();
      touch();
      flat.unshard_async();
      flat.reshard();
      touch();
      if (group.rank() == 0) sentences[form == ShardForm::kMapped ? 1 : 0] = texts;
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  EXPECT_EQ(sentences[0].size(), 6U);
  EXPECT_EQ(sentences[0], sentences[1]);
}

// Whether a guard against writes still allows reads, which is the case since libtorch 2.13.
template <typename Storage>
constexpr bool kReadsArePossible = requires(Storage& storage) { storage.has_materializer(); };

// Requires that a mapped shard can be read outside of an update, as norms and snapshots do.
void require_readable(const Tensor& leaf) {
  require(torch::equal(leaf.detach().clone(), leaf.detach() + 0), "copies");
  require(std::isfinite(leaf.detach().norm().item<double>()), "a norm");
  require(leaf.const_data_ptr() != nullptr || leaf.numel() == 0, "its memory");
}

TEST(ShardFence, AreWrittenByCadresStepOnly) {
  for (const auto compute : {torch::kFloat, torch::kBFloat16}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      ShardedTrainingOptions options = mapped();
      options.flat.compute_dtype = compute;
      ShardedTraining training(group, options);
      const std::vector<Tensor> before = training.values();
      const std::vector<Tensor> leaves = {training.units[0]->values(0)};
      const auto refused = [&](const std::function<void()>& body) {
        require_in(failure_of(body), "mapped shards are written by Cadre's own step only");
      };
      torch::optim::SGD sgd(leaves, 0.1);
      torch::optim::AdamW adamw(leaves);
      training.backward(0);
      // Rank 1 owns no element of this small unit, so its step writes nothing.
      if (group.rank() == 0) {
        refused([&] { sgd.step(); });
        refused([&] { adamw.step(); });
        const torch::NoGradGuard no_grad;
        refused([&] { leaves[0].zero_(); });
        refused([&] { leaves[0].data().add_(1); });
        refused([&] { training.units[0]->shard().zero_(); });
      }
      if (kReadsArePossible<c10::StorageImpl>) require_readable(leaves[0]);
      require(bits_equal(training.values(), before), "nothing was written");
      training.update();
      if (group.rank() == 0) refused([&] { sgd.step(); });
      require(!bits_equal(training.values(), before), "the step has written");
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(ShardFence, AStepThatThrowsIsCorruptionOnAllRanks) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    training.train(2);
    training.backward(2);
    if (group.rank() == 1) {
      training.optimizer->pause = [] { throw Error(ErrorCode::kInternal, "out of luck"); };
    }
    const std::string own = failure_of([&] { training.update(); });
    require(own == (group.rank() == 1 ? "kInternal: out of luck" : ""), own);
    for (int times = 0; times < 2; ++times) {
      const std::string failure = failure_of([&] { training.evaluate(2); });
      require_in(failure, "kCorruption: ");
      require_in(failure, "may be half written");
      require_in(failure, "esume from the last snapshot");
      require_in(failure, "parameters of unit 0 and those of 2 more units");
      require_in(failure, group.rank() == 1 ? "the step ended by an exception"
                                            : "the step of rank 1 ended by an exception");
    }
    require_in(failure_of([&] { training.weights[0].sum(); }), "are not available");
    require_in(failure_of([&] { training.update(); }), "kCorruption: ");
    require_in(failure_of([&] { training.units[2]->shard().zero_(); }), "Cadre's own step only");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1's step throws. The other ranks do not use the parameters afterwards, so they get the error
// only when they begin the next update.
TEST(ShardFence, AStepAfterAStepThatThrewIsRefusedOnAllRanks) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    training.train(1);
    training.backward(1);
    if (group.rank() == 1) {
      training.optimizer->pause = [] { throw Error(ErrorCode::kInternal, "out of luck"); };
    }
    failure_of([&] { training.update(); });
    const std::string failure = failure_of([&] { training.update(); });
    require(failure.starts_with("kCorruption: updating mapped shards"), failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardFence, AnUpdateThatIsNotFinishedIsCorruption) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    { const shard::FencedUpdate update(training.units[0]->fence()); }
    require_in(failure_of([&] { training.evaluate(0); }), "ShardUpdate::finish() was not called");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardFence, ForgetsParametersThatAreGone) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto fence = std::make_shared<shard::ShardFence>();
    const auto make = [&](const std::string& name) {
      return std::make_unique<shard::FlatParameters>(
          std::vector<NamedTensor>{{"weight", parameter_of(torch::ones({4}))}}, group,
          shard::FlatParametersOptions{.form = ShardForm::kMapped, .name = name, .fence = fence});
    };
    auto gone = make("of unit a");
    const auto stays = make("of unit b");
    gone.reset();
    { const shard::FencedUpdate update(fence); }
    stays->unshard_async();
    require_in(failure_of([&] { stays->wait_unsharded(); }),
               "while it wrote parameters of unit b, which may be half written");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardFence, RefuseAnUpdateOutOfPlace) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    shard::FlatParameters& unit = *training.units[0];
    const auto fence = unit.fence();
    require_in(failure_of([&] { fence->end_update(); }), "end_update() without begin_update()");
    fence->begin_update();
    require_in(failure_of([&] { fence->begin_update(); }), "inside of another update");
    require_in(failure_of([&] { training.evaluate(0); }), "are used during an update");
    require_in(failure_of([&] {
                 shard::FlatParameters flat({{"a", parameter_of(torch::ones({4}))}}, group,
                                            {.form = ShardForm::kMapped, .fence = fence});
               }),
               "cannot be sharded during an update");
    fence->end_update();
    unit.unshard_async();
    unit.wait_unsharded();
    require_in(failure_of([&] { unit.take_from_parameters(); }),
               "of mapped parameters needs a private copy and an update");
    unit.reshard();
    require_in(failure_of([&] { unit.make_private(); }), "needs the whole parameters");
    require_in(failure_of([&] {
                 shard::FlatParameters flat({{"a", parameter_of(torch::ones({4}))}}, group,
                                            {.form = ShardForm::kMapped, .keep_full = true});
               }),
               "choose one of them");
    const ProcessGroup alone = *group.split({.color = group.rank()});
    require_in(failure_of([&] {
                 shard::FlatParameters flat({{"a", parameter_of(torch::ones({4}))}}, alone,
                                            {.form = ShardForm::kMapped, .fence = fence});
               }),
               "a fence for each group");
    training.train(2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program must not write to mapped parameters: if each rank added 1 in place, the shared memory
// would change by the number of ranks.
TEST(ShardFence, AWriteToTheParametersIsNoticed) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    shard::FlatParameters& unit = *training.units[0];
    unit.unshard_async();
    unit.wait_unsharded();
    if (group.rank() == 1) {
      const torch::NoGradGuard no_grad;
      training.weights[0].mul_(2);
    }
    const std::string own = failure_of([&] { unit.reshard(); });
    if (group.rank() == 1)
      require_in(own, "kCorruption: of unit 0, rank 1: the program has written");
    if (group.rank() == 0) require(own.empty(), own);
    require_in(failure_of([&] { training.weights[0].sum(); }), "are sharded");
    // Rank 1 writes to the parameters after a forward. The step of the optimizer must then fail on
    // all ranks.
    training.units[1]->unshard_async();
    training.units[1]->wait_unsharded();
    if (group.rank() == 1) {
      const torch::NoGradGuard no_grad;
      training.biases[1].zero_();
    }
    require_in(failure_of([&] { training.update(); }),
               group.rank() == 1 ? "kCorruption: of unit 1, rank 1: the program has written"
                                 : "rank 1 cannot take part; look at its error");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardFence, ABackwardThroughAForwardBeforeAStepIsRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    // The weight has less than a page, so rank 1 owns no element of it.
    const Tensor weight = parameter_of(torch::ones({3}));
    shard::FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
    flat.unshard_async();
    flat.wait_unsharded();
    const Tensor loss = (weight * weight).sum();
    ShardedOptimizer<torch::optim::SGD> sgd(testing::FencedLeaves{flat.fence(), {flat.values(0)}},
                                            0.1);
    flat.values(0).mutable_grad() = torch::ones_like(flat.values(0));
    sgd.step();
    flat.unshard_async();
    flat.wait_unsharded();
    require_in(failure_of([&] { loss.backward(); }), "modified by an inplace operation");
    require(torch::allclose(weight.detach(), torch::full({3}, 0.9)), "the step");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardFence, AClosureRunsBeforeTheUpdate) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    ShardedTraining other(group, mapped());
    const double loss = training.backward(0);
    training.update();
    const Tensor returned = other.optimizer->step([&] { return torch::tensor(other.backward(0)); });
    require(returned.item<float>() == static_cast<float>(loss), "the loss");
    require(bits_equal(other.values(), training.values()), "the same step");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
