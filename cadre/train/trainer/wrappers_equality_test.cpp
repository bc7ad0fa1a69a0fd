// On one host, DistributedDataParallel and FullyShardedDataParallel, on gathered and on mapped
// shards, compute the same bits: losses, and parameters after some steps.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fsdp_training.h"

namespace cadre {
namespace {

using testing::all_units;
using testing::Case;
using testing::copies_of;
using testing::make_batches;
using testing::make_unit_model;
using testing::Model;
using testing::share_of;
using testing::Snapshot;
using testing::Tensor;

constexpr uint64_t kSeed = 1;
constexpr size_t kBitwiseSteps = 5;

template <typename O, typename Options, typename Wrapper>
std::unique_ptr<torch::optim::Optimizer> optimizer_of(Wrapper& wrapper, const Options& options) {
  if constexpr (HasShardFence<Wrapper>) {
    return std::make_unique<ShardedOptimizer<O>>(wrapper, options);
  } else {
    return std::make_unique<O>(wrapper.parameters(), options);
  }
}

// Returns the losses of this rank.
template <typename Wrapper>
Snapshot train_steps(const Case& test_case, const std::vector<Tensor>& batches,
                     const ProcessGroup& group, Wrapper& wrapper, Model& model) {
  const auto optimizer =
      test_case.optimizer == "sgd"
          ? optimizer_of<SGD>(wrapper, torch::optim::SGDOptions(0.05).momentum(0.9))
          : optimizer_of<AdamW>(wrapper, torch::optim::AdamWOptions(0.003));
  Snapshot losses;
  const auto share = share_of(test_case.batch, group.rank(), group.world_size());
  for (size_t step = 0; step < kBitwiseSteps; ++step) {
    const Tensor rows = batches[step].narrow(0, share.begin, share.size());
    optimizer->zero_grad();
    const Tensor loss = model.loss(wrapper(rows), rows);
    losses.push_back(loss.detach().clone());
    loss.backward();
    optimizer->step();
  }
  return losses;
}

class WrappersEquality : public ::testing::TestWithParam<Case> {};

TEST_P(WrappersEquality, DdpAndFsdpGiveTheSameBits) {
  const Case& test_case = GetParam();
  // Made here, because they draw from the generator of the process.
  const auto batches = make_batches(test_case, kSeed);
  for (const int world_size : {1, 2, 3, 4, 8}) {
    // By rank, of three wrappers.
    std::vector<std::vector<std::shared_ptr<Model>>> models(3);
    for (auto& of_wrapper : models) {
      for (int rank = 0; rank < world_size; ++rank) {
        of_wrapper.push_back(make_unit_model(test_case, kSeed));
      }
    }
    std::vector<Snapshot> expected(world_size), gathered(world_size), mapped(world_size);
    const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
      const int rank = group.rank();
      DistributedDataParallel<Model> ddp{models[0][rank], group};
      expected[rank] = train_steps(test_case, batches, group, ddp, *models[0][rank]);
      for (const Tensor& parameter : copies_of(models[0][rank]->parameters())) {
        expected[rank].push_back(parameter);
      }
      const auto train_sharded = [&](const std::shared_ptr<Model>& model, ShardForm form) {
        FullyShardedDataParallelOptions options = all_units(test_case, world_size);
        options.weighting = GradientWeighting::kSamples;
        options.form = form;
        FullyShardedDataParallel<Model> fsdp{model, group, options};
        EXPECT_EQ(fsdp.form(), form);
        Snapshot seen = train_steps(test_case, batches, group, fsdp, *model);
        const auto full = fsdp.summon_full_params();
        for (const Tensor& parameter : copies_of(model->parameters())) seen.push_back(parameter);
        return seen;
      };
      gathered[rank] = train_sharded(models[1][rank], ShardForm::kGathered);
      mapped[rank] = train_sharded(models[2][rank], ShardForm::kMapped);
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (int rank = 0; rank < world_size; ++rank) {
      const std::string where = std::to_string(world_size) + " ranks, rank " + std::to_string(rank);
      EXPECT_EQ(testing::bits_of(gathered[rank]), testing::bits_of(expected[rank])) << where;
      EXPECT_EQ(testing::bits_of(mapped[rank]), testing::bits_of(expected[rank])) << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, WrappersEquality,
                         ::testing::Values(Case{"gpt", "adamw", 24, torch::kFloat},
                                           Case{"gpt", "adamw", 25, torch::kFloat},
                                           Case{"mlp", "sgd", 25, torch::kDouble},
                                           Case{"cnn", "sgd", 24, torch::kFloat}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
