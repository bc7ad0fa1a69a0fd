// Tests which experts the router selects for a token.
#include "cadre/parallel/ep/router.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace cadre {
namespace {

using torch::Tensor;

TEST(ChooseExperts, TakesTheLowestIndexOfEqualLogits) {
  const Tensor logits = torch::zeros({3, 40});
  logits[1][17] = 1;
  logits[2][39] = 1;
  logits[2][38] = 1;
  const parallel::RouterChoices choices =
      parallel::choose_experts(logits, {.num_selected = 3, .normalize_weights = true});
  EXPECT_TRUE(torch::equal(choices.experts,
                           torch::tensor({{0, 1, 2}, {17, 0, 1}, {38, 39, 0}}, torch::kLong)));
  EXPECT_TRUE(torch::allclose(choices.weights.sum(1), torch::ones({3})));
}

}  // namespace
}  // namespace cadre
