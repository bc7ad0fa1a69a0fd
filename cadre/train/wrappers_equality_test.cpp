// On one host, DistributedDataParallel and FullyShardedDataParallel train to the same bits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/optim/optimizers.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fsdp_test_training.h"

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

template <typename Wrapper>
void train_steps(const Case& test_case, const std::vector<Tensor>& batches,
                 const ProcessGroup& group, Wrapper& wrapper, Model& model) {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (test_case.optimizer == "sgd") {
    optimizer =
        std::make_unique<SGD>(wrapper.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  } else {
    optimizer = std::make_unique<AdamW>(wrapper.parameters(), torch::optim::AdamWOptions(0.003));
  }
  const auto share = share_of(test_case.batch, group.rank(), group.world_size());
  for (size_t step = 0; step < kBitwiseSteps; ++step) {
    const Tensor rows = batches[step].narrow(0, share.begin, share.size());
    optimizer->zero_grad();
    model.loss(wrapper(rows), rows).backward();
    optimizer->step();
  }
}

class WrappersEquality : public ::testing::TestWithParam<Case> {};

TEST_P(WrappersEquality, DdpAndFsdpGiveTheSameBits) {
  const Case& test_case = GetParam();
  // Made here, because they draw from the generator of the process.
  const auto batches = make_batches(test_case, kSeed);
  for (const int world_size : {2, 3, 4}) {
    std::vector<std::shared_ptr<Model>> replicated, sharded;
    for (int rank = 0; rank < world_size; ++rank) {
      replicated.push_back(make_unit_model(test_case, kSeed));
      sharded.push_back(make_unit_model(test_case, kSeed));
    }
    std::vector<Snapshot> expected(world_size), actual(world_size);
    const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
      const int rank = group.rank();
      DistributedDataParallel<Model> ddp{replicated[rank], group};
      train_steps(test_case, batches, group, ddp, *replicated[rank]);
      expected[rank] = copies_of(replicated[rank]->parameters());
      FullyShardedDataParallelOptions options = all_units(test_case, world_size);
      options.weighting = GradientWeighting::kSamples;
      FullyShardedDataParallel<Model> fsdp{sharded[rank], group, options};
      train_steps(test_case, batches, group, fsdp, *sharded[rank]);
      const auto full = fsdp.summon_full_params();
      actual[rank] = copies_of(sharded[rank]->parameters());
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(testing::bits_of(actual[rank]), testing::bits_of(expected[rank]))
          << world_size << " ranks, rank " << rank;
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
