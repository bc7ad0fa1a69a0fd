// Tests that only the rank that has saved the optimizer state of its shards can load the archive.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamWOptions;

// The parameter is marked as a shard, as wrappers and parallelize_module() mark theirs. Rank 1
// tries to load the archive of rank 0.
TEST(OptimizerLoading, AStateOfAnotherRanksShardsIsRefused) {
  const auto optimizer_of = [](int rank, auto make) {
    at::Tensor shard = torch::ones({4}).requires_grad_(true);
    wrap::mark_as_shard(shard,
                        {.parameter = "weight", .owner = "a test", .rank = rank, .num_ranks = 2});
    shard.mutable_grad() = torch::full({4}, 1.0 + rank);
    auto optimizer = make(shard);
    optimizer->step();
    return optimizer;
  };
  const auto check = [&](auto make) {
    for (const int saved_by : {0, 1}) {
      std::stringstream file;
      torch::save(*optimizer_of(saved_by, make), file);
      const auto running = optimizer_of(1, make);
      std::string refused;
      try {
        torch::load(*running, file);
      } catch (const Error& error) {
        refused = error.message();
      }
      if (saved_by == 1) {
        EXPECT_EQ(refused, "");
      } else {
        EXPECT_THAT(refused, AllOf(HasSubstr("cadre::"),
                                   HasSubstr("the archive has the state of the shards of rank 0 of "
                                             "2; expected those of rank 1 of 2")));
      }
    }
  };
  check([](const at::Tensor& shard) {
    return std::make_unique<AdamW>(std::vector<at::Tensor>{shard}, AdamWOptions(kRate));
  });
  check([](const at::Tensor& shard) {
    return std::make_unique<Adam>(std::vector<at::Tensor>{shard}, torch::optim::AdamOptions(kRate));
  });
  check([](const at::Tensor& shard) {
    return std::make_unique<SGD>(std::vector<at::Tensor>{shard},
                                 torch::optim::SGDOptions(kRate).momentum(0.9));
  });
}

}  // namespace
}  // namespace cadre::optim_test
