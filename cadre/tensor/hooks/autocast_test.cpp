#include "cadre/tensor/hooks/autocast.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/types.h>

#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {
namespace {

torch::ScalarType dtype_of_product() {
  return torch::mm(torch::ones({2, 3}), torch::ones({3, 2})).scalar_type();
}

TEST(Autocast, LowersProductsInItsScopeAlone) {
  EXPECT_EQ(dtype_of_product(), torch::kFloat);
  {
    const Autocast outer;
    EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
    {
      const Autocast inner(torch::kHalf);
      EXPECT_EQ(dtype_of_product(), torch::kHalf);
    }
    EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
    {
      const Autocast off(torch::kFloat);
      EXPECT_EQ(dtype_of_product(), torch::kFloat);
    }
    EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
  }
  EXPECT_EQ(dtype_of_product(), torch::kFloat);
}

// The second scope must cast the parameter again. Without clear_cache() it would use the cached
// cast of the earlier values.
TEST(Autocast, SeesNewValuesOfAParameterInTheNextScope) {
  const Tensor weight = torch::full({1, 1}, 2.0F).requires_grad_();
  const auto output = [&] {
    const Autocast autocast;
    return torch::mm(torch::ones({1, 1}), weight).to(torch::kFloat).item<float>();
  };
  EXPECT_EQ(output(), 2);
  weight.data().fill_(3);
  EXPECT_EQ(output(), 3);
}

TEST(Autocast, LeavesGradientsInTheDtypeOfTheirParameters) {
  torch::nn::Linear layer(3, 2);
  Tensor loss;
  {
    const Autocast autocast;
    loss = layer(torch::ones({4, 3})).to(torch::kFloat).sum();
  }
  loss.backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(layer->weight.grad(), torch::full({2, 3}, 4.0)));
}

TEST(Autocast, RefusesOtherDtypesAndChangesNothing) {
  EXPECT_THAT(
      error_of([] { const Autocast autocast(torch::kDouble); }, ErrorCode::kInvalidArgument),
      ::testing::HasSubstr("Double"));
  EXPECT_EQ(dtype_of_product(), torch::kFloat);
}

}  // namespace
}  // namespace cadre::testing
