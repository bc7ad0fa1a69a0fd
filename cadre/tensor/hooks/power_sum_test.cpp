#include "cadre/tensor/hooks/power_sum.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cadre::power_sum_test {
namespace {

constexpr double kMaximum = std::numeric_limits<double>::infinity();  // the p of the maximum norm

using wrap::joint_power_sum;
using wrap::norm_of_power_sum;
using wrap::power_sum;

TEST(PowerSum, IsTheFormulaForEveryP) {
  const at::Tensor values = at::tensor({3.0, -4.0, 0.0, 1.0}, at::kFloat);
  EXPECT_EQ(power_sum(values, 1), 8);
  EXPECT_EQ(power_sum(values, 2), 26);
  EXPECT_DOUBLE_EQ(power_sum(values, 3), 27 + 64 + 1);
  EXPECT_EQ(power_sum(values, kMaximum), 4);
  EXPECT_EQ(power_sum(at::empty({0}), 2), 0);
  EXPECT_EQ(power_sum(at::complex(at::tensor({3.0F, 0.0F}), at::tensor({4.0F, 2.0F})), 2), 29);
}

TEST(PowerSum, AddsManySmallNumbersInFloat64) {
  // The elements fill more than one block of 2^18, and their number is no multiple of the 8 partial
  // sums.
  constexpr int64_t kCount = (int64_t{1} << 19) + 5;
  const double square = static_cast<double>(0.1F) * static_cast<double>(0.1F);
  const double sum = power_sum(at::full({kCount}, 0.1F), 2);
  EXPECT_NEAR(sum / (static_cast<double>(kCount) * square), 1, 1e-10);
  const at::Tensor half = at::full({kCount}, 0.5F, at::kHalf);
  EXPECT_EQ(power_sum(half, 1), static_cast<double>(kCount) / 2);
}

TEST(PowerSum, TheMaximumNormIsNaNWhereAnElementIs) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(power_sum(at::tensor({1.0, nan, 2.0}), kMaximum)));
  EXPECT_TRUE(std::isnan(joint_power_sum(nan, 2, kMaximum)));
  EXPECT_TRUE(std::isnan(joint_power_sum(2, nan, kMaximum)));
}

TEST(PowerSum, SumsOfTwoSetsMakeTheNormOfBoth) {
  EXPECT_EQ(joint_power_sum(9, 16, 2), 25);
  EXPECT_EQ(norm_of_power_sum(25, 2), 5);
  EXPECT_EQ(joint_power_sum(3, 7, kMaximum), 7);
  EXPECT_EQ(norm_of_power_sum(7, kMaximum), 7);
}

}  // namespace
}  // namespace cadre::power_sum_test
