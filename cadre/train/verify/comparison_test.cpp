// Tests how the deviations of losses, gradients and parameters from the reference are computed.
#include "cadre/train/verify/comparison.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cadre/train/verify/reference_run.h"

namespace cadre::verify {
namespace {

using at::Tensor;

ReferenceRun one_tensor(double scale) {
  ReferenceRun run{.names = {"p"}, .steps = {}};
  for (int step = 0; step < 3; ++step) {
    run.steps.push_back(
        {.loss = 2,
         .loss_bound = 0.1,
         .gradients = {{.values = torch::full({2}, scale), .scale = scale, .bound = 0.1}},
         .parameters = {}});
  }
  return run;
}

std::vector<NamedTensor> gradient_of(double first, double second) {
  return {{"p", torch::tensor({first, second}, torch::kDouble)}};
}

TEST(Comparison, KeepsTheLargestShareUpToTheFirstStepThatExceeds) {
  const ReferenceRun run = one_tensor(10);
  Comparison comparison(run, 3);
  comparison.add_gradients(1, gradient_of(10, 10.5));
  EXPECT_NEAR(comparison.gradients().deviation.difference, 0.05, 1e-12);
  EXPECT_EQ(comparison.gradients().deviation.rank, 3);
  EXPECT_EQ(comparison.gradients().deviation.name, "p");
  comparison.add_gradients(2, gradient_of(12, 10));
  comparison.add_gradients(3, gradient_of(90, 10));
  EXPECT_EQ(comparison.gradients().deviation.step, 2);
  EXPECT_NEAR(comparison.gradients().deviation.difference, 0.2, 1e-12);
  EXPECT_FALSE(comparison.gradients().deviation.is_within());
}

TEST(Comparison, NaNAndValuesWhereAllAreZeroExceedEveryBound) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const ReferenceRun run = one_tensor(10);
  Comparison of_nan(run, 0);
  // This deviation is within the bound, so the NaN of step 2 is still reported.
  of_nan.add_gradients(1, gradient_of(10, 10.5));
  of_nan.add_loss(1, 2.1);
  of_nan.add_gradients(2, gradient_of(10, nan));
  of_nan.add_loss(2, nan);
  EXPECT_TRUE(std::isnan(of_nan.gradients().deviation.difference));
  EXPECT_FALSE(of_nan.gradients().deviation.is_within());
  EXPECT_FALSE(of_nan.loss().deviation.is_within());
  const ReferenceRun zeros = one_tensor(0);
  Comparison of_zeros(zeros, 0);
  of_zeros.add_gradients(1, gradient_of(0, 0));
  EXPECT_TRUE(of_zeros.gradients().deviation.is_within());
  of_zeros.add_gradients(2, gradient_of(0, 1e-30));
  EXPECT_FALSE(of_zeros.gradients().deviation.is_within());
}

TEST(Comparison, AGradientThatIsMissingCountsAsZeros) {
  const ReferenceRun run = one_tensor(10);
  Comparison comparison(run, 0);
  comparison.add_gradients(1, std::vector<NamedTensor>{{"p", Tensor()}});
  EXPECT_EQ(comparison.gradients().deviation.difference, 1);
}

}  // namespace
}  // namespace cadre::verify
