// Tests that a ZeRO optimizer over DistributedDataParallel gives the same bits as the unsharded
// optimizer, both with gradients that are views of the wrapper's buckets (stage 1) and with
// gradients that exist only on the ranks that own them (stage 2).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_models.h"

namespace cadre {
namespace {

// kStage1Later: step() does not wait for the gathers of the parameters; the next forward does.
enum class Way { kUndivided, kStage1, kStage1Later, kStage2 };

// Trains eight steps on this rank's rows, whose number differs between ranks. Every third step
// accumulates the gradients of two backwards.
std::shared_ptr<testing::Model> train_under_ddp(const ProcessGroup& group, Way way) {
  const auto model = testing::make_model({"gpt", "adamw", 1, torch::kFloat}, /*seed=*/3);
  {
    // Gives each rank other initial values, although all ranks (threads) draw from one generator.
    const torch::NoGradGuard no_grad;
    double first = group.rank();
    for (torch::Tensor& parameter : model->parameters()) {
      const torch::Tensor numbers = torch::arange(parameter.numel()) * 0.37 + first++;
      parameter.copy_(0.3 * torch::sin(numbers).view(parameter.sizes()));
    }
  }
  DistributedDataParallel ddp{model,
                              group,
                              {.gradients = way == Way::kStage2 ? GradientPlacement::kSharded
                                                                : GradientPlacement::kReplicated}};
  const auto options = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (way == Way::kStage2) {
    optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(ddp, options,
                                                                 ZeroOptions{.wait_in_step = true});
  } else if (way == Way::kStage1Later) {
    optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(
        ddp, options, ZeroOptions{.bucket_cap_bytes = 1000, .wait_in_step = false});
  } else if (way == Way::kStage1) {
    optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(
        model->named_parameters(), group, options, ZeroOptions{.bucket_cap_bytes = 1000});
  } else {
    optimizer = std::make_unique<AdamW>(model->parameters(), options);
  }
  for (int step = 0; step < 8; ++step) {
    const int64_t rows = 1 + (group.rank() + step) % 3;
    const torch::Tensor batch =
        torch::arange(rows * testing::kContext).view({rows, testing::kContext}) + step;
    const torch::Tensor x = batch.remainder(testing::kVocabulary);
    optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    if (step % 3 == 2) {
      const auto guard = ddp.no_sync();
      model->loss(ddp(x), x).backward();
    }
    model->loss(ddp(x), x).backward();
    optimizer->step();
  }
  const torch::NoGradGuard no_grad;
  // A forward waits for the gathers of the parameters, even without grad.
  ddp(torch::zeros({1, testing::kContext}, torch::kLong));
  return model;
}

TEST(ZeroUnderDdp, HasTheBitsOfTheUndividedOptimizer) {
  for (const int world_size : {1, 2, 3, 4}) {
    const auto result = testing::run_groups(world_size, [](const ProcessGroup& group) {
      const auto plain = train_under_ddp(group, Way::kUndivided);
      for (const Way way : {Way::kStage1, Way::kStage1Later, Way::kStage2}) {
        const auto divided = train_under_ddp(group, way);
        for (const auto& item : plain->named_parameters()) {
          testing::require(torch::equal(divided->named_parameters()[item.key()], item.value()),
                           item.key() + (way == Way::kStage2 ? " in stage 2" : " in stage 1"));
        }
      }
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

// One rank steps its learning rate scheduler once too often. Every step compares the options of the
// ranks, so all ranks throw.
TEST(ZeroUnderDdp, OptionsThatDifferInAStepAreRefusedOnAllRanks) {
  for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      const auto net = std::make_shared<torch::nn::LinearImpl>(5, 3);
      DistributedDataParallel<torch::nn::LinearImpl> ddp{net, group, {.gradients = placement}};
      ZeroRedundancyOptimizer<AdamW> optimizer(ddp, torch::optim::AdamWOptions(0.01));
      for (const double rate : {0.01, 0.02}) {
        if (group.rank() == 1) optimizer.param_groups()[0].options().set_lr(rate);
        ddp(torch::ones({2, 5})).sum().backward();
        output = testing::failure_of([&] { optimizer.step(); });
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_NE(rank.output.find("the set of options of group 0 is (lr 0.01,"), std::string::npos);
      EXPECT_NE(rank.output.find("(lr 0.02,"), std::string::npos) << rank.output;
    }
  }
}

}  // namespace
}  // namespace cadre
