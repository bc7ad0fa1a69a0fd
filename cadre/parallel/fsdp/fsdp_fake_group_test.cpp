// Tests a dry run: one process trains as each rank in turn, in a fake group whose other ranks do
// not exist.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fake_process_group.h"
#include "cadre/testing/torch/fsdp_models.h"

namespace cadre {
namespace {

int64_t num_elements(const std::vector<torch::Tensor>& tensors) {
  int64_t sum = 0;
  for (const torch::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

TEST(FsdpOnFakeGroups, TrainsTheShardOfEachRankAlone) {
  constexpr int kRanks = 8;
  int64_t num_whole = 0;
  int64_t num_owned = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const ProcessGroup world = testing::make_fake_group(kRanks, {.rank = rank});
    const auto module = std::make_shared<testing::UnitMlp>();
    num_whole = num_elements(module->parameters());
    FullyShardedDataParallel<testing::UnitMlp> model(
        module, world, FullyShardedDataParallelOptions{.wrap_policy = wrap_shard_units()});
    ShardedOptimizer<AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(torch::ones({3, 12})).pow(2).mean().backward();
      optimizer.step();
    }
    num_owned += num_elements(model.parameters());
    EXPECT_LT(num_elements(model.parameters()), num_whole);
  }
  EXPECT_GT(num_whole, kRanks);
  EXPECT_EQ(num_owned, num_whole);
}

}  // namespace
}  // namespace cadre
