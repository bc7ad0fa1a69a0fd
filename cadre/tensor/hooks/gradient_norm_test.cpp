// Compares clip_grad_norm_() with a sum over all elements in float64, and with libtorch's function.
#include "cadre/tensor/hooks/gradient_norm.h"

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_neg_view.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor with_gradient(const Tensor& gradient) {
  Tensor parameter = torch::zeros_like(gradient).requires_grad_(true);
  parameter.mutable_grad() = gradient;
  return parameter;
}

// Returns a matrix, a transposed matrix, a vector and a scalar.
Tensors make_parameters(torch::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(1);
  return {with_gradient(torch::randn({5, 3}).to(dtype)),
          with_gradient(torch::randn({4, 6}).to(dtype).t()),
          with_gradient(torch::randn({700}).to(dtype)), with_gradient(torch::randn({}).to(dtype))};
}

Tensors gradients_of(const Tensors& parameters) {
  Tensors gradients;
  for (const Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad().detach().clone());
  }
  return gradients;
}

// Computes the norm by its definition, element by element.
double norm_by_formula(const Tensors& gradients, double p) {
  double sum = 0;
  for (const Tensor& gradient : gradients) {
    const Tensor flat = gradient.to(torch::kDouble).contiguous();
    const double* values = flat.const_data_ptr<double>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double size = std::abs(values[i]);
      sum = std::isinf(p) ? std::max(sum, size) : sum + std::pow(size, p);
    }
  }
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

void expect_scaled(const Tensors& parameters, const Tensors& before, double factor,
                   double tolerance) {
  const Tensors after = gradients_of(parameters);
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].scalar_type(), before[i].scalar_type());
    EXPECT_TRUE(torch::allclose(after[i].to(torch::kDouble), before[i].to(torch::kDouble) * factor,
                                tolerance, 0))
        << "gradient " << i << ", factor " << factor;
  }
}

std::string refusal(const Tensors& parameters, double max_norm,
                    const ClipGradNormOptions& options = {}) {
  try {
    clip_grad_norm_(parameters, max_norm, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "no error";
}

TEST(ClipGradNorm, IsTheFormulaForEveryP) {
  for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      const Tensors parameters = make_parameters(dtype);
      const Tensors before = gradients_of(parameters);
      const double expected = norm_by_formula(before, p);
      const double norm = clip_grad_norm_(parameters, 0.7, {.norm_type = p});
      EXPECT_NEAR(norm, expected, 1e-13 * expected) << "p " << p;
      expect_scaled(parameters, before, 0.7 / (expected + 1e-6),
                    dtype == torch::kDouble ? 1e-13 : 3e-7);
    }
  }
}

// A float32 sum of this many squares would have an error of 9e-5. The elements fill several blocks
// of the summation, the last one only in part.
TEST(ClipGradNorm, IsExactForLargeGradients) {
  torch::manual_seed(2);
  const Tensors parameters = {with_gradient(torch::randn({2048, 2047}))};
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    const double expected = norm_by_formula(gradients_of(parameters), p);
    EXPECT_NEAR(clip_grad_norm_(parameters, kInfinity, {.norm_type = p}), expected,
                1e-11 * expected)
        << "p " << p;
  }
}

TEST(ClipGradNorm, IsLibtorchs) {
  for (const double p : {1.0, 2.0, kInfinity}) {
    const Tensors own = make_parameters(), truth = make_parameters();
    const double expected = torch::nn::utils::clip_grad_norm_(truth, 0.5, p);
    EXPECT_NEAR(clip_grad_norm_(own, 0.5, {.norm_type = p}), expected, 1e-6 * expected);
    expect_scaled(own, gradients_of(truth), 1, 1e-6);
  }
}

TEST(ClipGradNorm, ANormWithinTheLimitChangesNoBit) {
  const Tensors parameters = make_parameters();
  const Tensors before = gradients_of(parameters);
  const double norm = norm_by_formula(before, 2);
  for (const double limit : {norm * 1.001, kInfinity}) {
    EXPECT_NEAR(clip_grad_norm_(parameters, limit), norm, 1e-5 * norm);
    const Tensors after = gradients_of(parameters);
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i]));
  }
}

TEST(ClipGradNorm, ALimitOfZeroLeavesZeros) {
  const Tensors parameters = make_parameters();
  EXPECT_GT(clip_grad_norm_(parameters, 0), 1);
  for (const Tensor& gradient : gradients_of(parameters)) {
    EXPECT_TRUE(torch::equal(gradient, torch::zeros_like(gradient)));
  }
  EXPECT_EQ(clip_grad_norm_(parameters, 0), 0) << "the norm of zeros";
  EXPECT_FALSE(gradients_of(parameters)[0].isnan().any().item<bool>());
}

TEST(ClipGradNorm, UndefinedAndEmptyGradientsDoNotCount) {
  const Tensor none = torch::ones({3}).requires_grad_(true);
  const Tensor empty = with_gradient(torch::zeros({0, 4}));
  for (const double p : {1.0, 2.0, kInfinity}) {
    EXPECT_EQ(clip_grad_norm_({}, 1, {.norm_type = p}), 0);
    EXPECT_EQ(clip_grad_norm_(Tensors{none, empty}, 1, {.norm_type = p}), 0);
    const Tensor some = with_gradient(torch::tensor({3.0, -4.0}, torch::kDouble));
    EXPECT_DOUBLE_EQ(clip_grad_norm_(Tensors{none, empty, some}, 1, {.norm_type = p}),
                     norm_by_formula({torch::tensor({3.0, -4.0}, torch::kDouble)}, p));
  }
  EXPECT_FALSE(none.grad().defined());
}

// If two members of a module share a tensor, parameters() of the module lists it twice.
TEST(ClipGradNorm, ATiedParameterCountsOnce) {
  const Tensor tied = with_gradient(torch::tensor({3.0, 4.0}, torch::kDouble));
  EXPECT_DOUBLE_EQ(clip_grad_norm_(Tensors{tied, tied}, 1), 5);
  EXPECT_TRUE(torch::allclose(tied.grad(), torch::tensor({0.6, 0.8}, torch::kDouble), 1e-6, 0))
      << "scaled once";
}

// Each gradient has 1,000 elements of 1 + 2^-7. Except for the maximum norm, none of their p-norms
// is representable in bfloat16 or float16, so rounding it would be detected.
TEST(ClipGradNorm, LowPrecisionIsSummedInFloat64) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const Tensors parameters = {with_gradient(torch::full({1000}, 1.0078125, dtype)),
                                with_gradient(torch::full({3}, 0.001)),
                                with_gradient(torch::full({100}, -0.25, dtype)),
                                with_gradient(torch::full({5}, 1e-3, torch::kDouble))};
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      const double expected = norm_by_formula(gradients_of(parameters), p);
      EXPECT_NEAR(clip_grad_norm_(parameters, kInfinity, {.norm_type = p}), expected,
                  1e-13 * expected)
          << "p " << p;
    }
    const Tensors before = gradients_of(parameters);
    const double norm = clip_grad_norm_(parameters, 2);
    expect_scaled(parameters, before, 2 / (norm + 1e-6), dtype == torch::kHalf ? 1e-3 : 8e-3);
  }
}

TEST(ClipGradNorm, WhatIsNotFiniteSpreadsAsInPyTorch) {
  const auto clipped = [](float bad, double max_norm) {
    const Tensors parameters = {with_gradient(torch::ones({2})),
                                with_gradient(torch::tensor({1.0f, bad}))};
    clip_grad_norm_(parameters, max_norm);
    return torch::cat(gradients_of(parameters));
  };
  EXPECT_TRUE(clipped(std::nanf(""), 1).isnan().all().item<bool>());
  const Tensor infinite = clipped(std::numeric_limits<float>::infinity(), 1);
  EXPECT_TRUE(torch::equal(infinite.narrow(0, 0, 3), torch::zeros({3})));
  EXPECT_TRUE(infinite[3].isnan().item<bool>()) << "infinity by 0";
  EXPECT_EQ(clipped(std::nanf(""), kInfinity).isnan().sum().item<int64_t>(), 1) << "no limit";
}

TEST(ClipGradNorm, WhatIsNotFiniteIsRefusedIfAskedForAndNothingIsScaled) {
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const double bad : {kNan, kInfinity}) {
      Tensors parameters = make_parameters();
      parameters.push_back(with_gradient(torch::full({2, 9}, bad)));
      const Tensors before = gradients_of(parameters);
      const std::string text = refusal(parameters, 1, {.norm_type = p, .error_if_nonfinite = true});
      EXPECT_THAT(text, HasSubstr(std::isnan(bad) ? "is nan" : "is inf"));
      EXPECT_THAT(text, HasSubstr("not finite has sizes (2, 9)"));
      const Tensors after = gradients_of(parameters);
      for (size_t i = 0; i + 1 < after.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i]));
    }
  }
  const Tensors large = {with_gradient(torch::full({2}, 1e200, torch::kDouble))};
  EXPECT_THAT(refusal(large, 1, {.error_if_nonfinite = true}),
              HasSubstr("every element is finite, so the sum of their powers exceeds float64"));
  EXPECT_EQ(refusal(make_parameters(), 1, {.error_if_nonfinite = true}), "no error");
}

// Autograd may return gradients that are conjugated or negated when they are read, or zeros without
// memory.
TEST(ClipGradNorm, LazyGradientsAreReadAndScaled) {
  torch::manual_seed(1);
  const Tensor complex = torch::randn({7}, torch::kComplexDouble);
  const Tensor real = torch::randn({4}, torch::kDouble);
  for (const double p : {1.0, 2.0, kInfinity}) {
    const Tensors parameters = {with_gradient(torch::zeros({7}, torch::kComplexDouble)),
                                with_gradient(torch::zeros({4}, torch::kDouble)),
                                with_gradient(torch::zeros({3}, torch::kDouble)),
                                with_gradient(real.clone())};
    parameters[0].mutable_grad() = complex.clone().conj();
    parameters[1].mutable_grad() = at::_neg_view(real.clone());
    parameters[2].mutable_grad() = at::_efficientzerotensor({3}, real.options());
    const double expected = norm_by_formula({complex.abs(), real, real}, p);
    EXPECT_NEAR(clip_grad_norm_(parameters, 0.1, {.norm_type = p}), expected, 1e-12 * expected);
    const double factor = 0.1 / (expected + 1e-6);
    const auto is_scaled = [&](size_t i, const Tensor& truth) {
      return torch::allclose(parameters[i].grad().resolve_conj().resolve_neg(), truth * factor,
                             1e-12, 0);
    };
    EXPECT_TRUE(is_scaled(0, complex.conj().resolve_conj()));
    EXPECT_TRUE(is_scaled(1, -real));
    EXPECT_EQ(parameters[2].grad().norm().item<double>(), 0);
    EXPECT_TRUE(is_scaled(3, real));
  }
  const Tensor leaf = torch::randn({4}, torch::kComplexFloat).requires_grad_(true);
  torch::real((leaf * leaf).conj().sum()).backward();
  EXPECT_GT(clip_grad_norm_(Tensors{leaf}, 0.1, {.error_if_nonfinite = true}), 0.1);
}

// A gradient whose elements share memory cannot be scaled in place. The error must come before any
// gradient is scaled, also those earlier in the list.
TEST(ClipGradNorm, GradientsThatCannotBeScaledAreRefusedFirst) {
  const Tensor good = with_gradient(torch::full({3}, 5.0));
  const Tensor expanded = with_gradient(torch::zeros({4}));
  expanded.mutable_grad() = torch::full({1}, 5.0).expand({4});
  EXPECT_EQ(refusal({good, expanded}, 0.1),
            "clip_grad_norm_: elements of the gradient of parameter 1 of 2, of sizes (4), share "
            "memory, as after expand(), so they cannot be scaled one by one; assign its clone() to "
            "the parameter's mutable_grad()");
  const Tensor inference = with_gradient(torch::zeros({4}));
  {
    const c10::InferenceMode mode;
    inference.mutable_grad() = torch::ones({4});
  }
  EXPECT_THAT(refusal({good, inference}, 0.1),
              HasSubstr("the gradient of parameter 1 of 2, of sizes (4), was made in inference "
                        "mode"));
  EXPECT_TRUE(torch::equal(good.grad(), torch::full({3}, 5.0))) << "nothing is scaled";
}

TEST(ClipGradNorm, BadInputIsRefused) {
  const Tensors parameters = make_parameters();
  for (const double p : {0.0, -1.0, -kInfinity, kNan}) {
    EXPECT_THAT(refusal(parameters, 1, {.norm_type = p}), HasSubstr("give a number > 0"));
  }
  for (const double max_norm : {-1e-9, -kInfinity, kNan}) {
    EXPECT_THAT(refusal(parameters, max_norm), HasSubstr("give a number >= 0"));
  }
  EXPECT_THAT(refusal({Tensor()}, 1), HasSubstr("parameter 0 of 1 is an undefined tensor"));
  Tensor sparse = torch::zeros({4, 3}).requires_grad_(true);
  sparse.mutable_grad() = torch::ones({4, 3}).to_sparse();
  EXPECT_EQ(refusal({parameters[0], sparse}, 1),
            "clip_grad_norm_: the gradient of parameter 1 of 2, of sizes (4, 3), is not dense; "
            "make it dense, for example by an embedding with sparse(false)");
}

}  // namespace
}  // namespace cadre
