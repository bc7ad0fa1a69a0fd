// Tests that DistributedDataParallel materializes a deferred module (cadre::defer_init), with rank
// 0's values.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

TEST(DdpDeferred, HasTheValuesOfRank0) {
  const auto make = [] { return std::make_shared<torch::nn::LinearImpl>(5, 3); };
  torch::manual_seed(7);
  const auto plain = make();
  for (const int world_size : {1, 2}) {
    std::mutex construction;  // serializes construction, because the ranks share the generator of
                              // the process
    const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
      std::unique_lock<std::mutex> lock(construction);
      torch::manual_seed(7 + static_cast<uint64_t>(group.rank()));
      const auto module = defer_init(make);
      lock.unlock();
      DistributedDataParallel model{module, group};
      EXPECT_TRUE(module->weight.equal(plain->weight));
      const torch::Tensor output = model(torch::ones({2, 5}));
      output.sum().backward();
      EXPECT_TRUE(output.equal(plain->forward(torch::ones({2, 5}))));
      EXPECT_TRUE(module->weight.grad().equal(torch::full({3, 5}, 2.0)));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

}  // namespace
}  // namespace cadre
