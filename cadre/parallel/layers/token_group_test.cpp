// Compares the cross-entropy over ranks that have different tokens with that of one process. Ranks
// are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>

#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

constexpr int64_t kClasses = 10;

// The ranks along "cp" have two and four of the six tokens; the loss ignores one token. The ranks
// along "tp" have half of the classes each.
TEST(TokenGroup, TheLossIsTheMeanOverTheTokensOfAllRanks) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"cp", 2}, {"tp", 2}});
    const Tensor logits =
        (torch::arange(6 * kClasses, torch::kDouble).sin() * 3).view({6, kClasses});
    const Tensor targets = torch::tensor({3, 0, 9, -100, 5, 7}, torch::kLong);
    const Tensor whole = logits.clone().requires_grad_(true);
    const Tensor expected = torch::nn::functional::cross_entropy(whole, targets);
    expected.backward();

    const bool is_first = mesh.coordinate("cp") == 0;
    const auto own_part = [&](const Tensor& tensor) {
      return tensor.narrow(0, is_first ? 0 : 2, is_first ? 2 : 4);
    };
    const auto own_classes = [&](const Tensor& tensor) {
      return own_part(tensor).narrow(1, 5 * mesh.coordinate("tp"), 5);
    };
    const Tensor own = own_classes(logits).clone().requires_grad_(true);
    const auto loss_of = [&](LossReduction reduction) {
      return vocab_parallel_cross_entropy(
          own, own_part(targets), mesh.group("tp"),
          {.vocabulary = kClasses, .reduction = reduction, .token_group = mesh.group("cp")});
    };
    const Tensor loss = loss_of(LossReduction::kMean);
    loss.backward();
    require(torch::allclose(loss, expected, 1e-12, 0), "loss");
    require(torch::allclose(own.grad(), own_classes(whole.grad()), 1e-12, 1e-15), "gradient");
    EXPECT_THAT(failure_of([&] { loss_of(LossReduction::kSum); }),
                HasSubstr("the reduction is kSum, but the options have a token group"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The ranks with the first part of the tokens have an invalid target. The ranks with the second
// part must throw the same error.
TEST(TokenGroup, ATargetThatOneRankRefusesIsAnErrorOnAll) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"cp", 2}, {"tp", 2}});
    const Tensor logits = torch::ones({2, 5}, torch::kDouble);
    const auto loss_of = [&](int64_t target) {
      return vocab_parallel_cross_entropy(
          logits, torch::tensor({int64_t{1}, mesh.coordinate("cp") == 0 ? target : 3}),
          mesh.group("tp"), {.vocabulary = kClasses, .token_group = mesh.group("cp")});
    };
    EXPECT_THAT(failure_of([&] { loss_of(kClasses); }), HasSubstr("the target 10 is none of the"));
    require(std::isfinite(loss_of(2).item<double>()), "the groups are usable");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
