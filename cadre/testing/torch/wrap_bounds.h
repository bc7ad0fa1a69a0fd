// Defines when training on ranks equals training in one process: the bounds within which gradients,
// parameters and losses may differ.
//
// Threads: plain values. Blocking: never.
//
// The bounds, for each tensor:
// gradients Relative to the tensor's largest value: 1e-10 in float64, 1e-5 in float32. Ranks add
// the same terms in another order, so gradients differ by a few roundings of partial sums. The
// terms of a gradient with only one element may cancel, so its bound is relative to its largest
// value in any step, which has the magnitude of the terms.
//   SGD            The same shares of the largest parameter: the update is linear in the gradient.
//   AdamW float64  The same shares.
//   AdamW float32  AdamwBound, for each element. The update divides by sqrt(v) + eps. So if
//                  gradients are close to zero, a difference in their last bits is amplified, up to
//                  the size of the update itself.
//   losses         The same share of the loss, plus the change of the loss by parameters within
//                  their bounds: see loss_bounds().
//   bfloat16       If a model has parameters in bfloat16: 2^-6 for gradients. Each rank rounds its
//                  part of a gradient to 8 bits (2^-8 of it), their sum is rounded once, and so is
//                  the gradient of one process; a fourth 2^-8 covers earlier roundings. For
//                  parameters, 2 kSteps 2^-8 of the largest value is added to the bound, because
//                  each of the two trainings rounds a parameter in each step, and they may deviate
//                  further each time. Such a wide bound finds only large defects; the gradients of
//                  the first step show smaller ones.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cadre/testing/torch/wrap_training.h"

namespace cadre::testing {

inline double tolerance_of(const Case& test_case) {
  if (has_bfloat16(test_case)) return 0x1p-6;
  return test_case.dtype == torch::kDouble ? 1e-10 : 1e-5;
}

inline double largest(const Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

// Returns how much the gradient of a parameter may differ in a step, by the rules above.
inline double gradient_tolerance(const Training& alone, size_t step, size_t parameter,
                                 double tolerance) {
  const Tensor& gradient = alone.gradients[step][parameter];
  if (!gradient.defined()) return 0;
  double size = largest(gradient);
  if (gradient.numel() == 1) {
    for (const Snapshot& gradients : alone.gradients) {
      if (gradients[parameter].defined()) size = std::max(size, largest(gradients[parameter]));
    }
  }
  return tolerance * size;
}

// Returns the relative error that the rounding of stored parameters adds to their bounds.
inline double rounding_share(const Case& test_case) {
  return has_bfloat16(test_case) ? 2 * kSteps * 0x1p-8 : 0;
}

// Returns tensors of bounds: each element is `share` times the largest absolute value of its
// tensor.
inline Snapshot share_of_largest(const Snapshot& tensors, double share) {
  Snapshot bounds;
  for (const Tensor& tensor : tensors) {
    bounds.push_back(tensor.defined()
                         ? torch::full_like(tensor, share * largest(tensor), torch::kDouble)
                         : Tensor());
  }
  return bounds;
}

// Bounds the difference of AdamW's parameters after kSteps if no gradient of any step differs by
// more than `tolerance` of its tensor's largest value.
//
// With m and s = sqrt(v), bias corrected, an update is u = lr m / (s + eps). m is a weighted mean
// of the gradients so far, and s is a weighted root mean square of them. If gradient i differs by
// at most d_i, then m differs by at most M, the same weighted mean of the d_i, and s differs by at
// most S, the same weighted root mean square of the d_i, because the root mean square is a norm.
// From
//   u' - u = lr (m' - m) / (s + eps) + lr m' / (s' + eps) (s - s') / (s + eps)
// and |m'| <= c s' (Cauchy and Schwarz; c depends on the betas and the step: 1 in the first step,
// 1.16 in the twentieth) follows |u' - u| <= lr (M + c S) / (s + eps), and never more than 2 c lr.
// The bound is the sum over the steps; weight decay only reduces it. The rounding of the parameter
// is added: four roundings in each step (two products and sums in either training), and one for the
// roundings of u, which is about a hundred times smaller than a parameter.
class AdamwBound {
 public:
  explicit AdamwBound(const Tensor& parameter)
      : largest_parameter_(largest(parameter)),
        sum_(torch::zeros_like(parameter, torch::kDouble)),
        square_(torch::zeros_like(sum_)) {}

  // `difference` is the largest difference of an element of the gradient.
  void add_step(const Tensor& gradient, double difference) {
    ++step_;
    square_ = mix(square_, gradient.to(torch::kDouble).square(), kBeta2);
    mean_difference_ = mix(mean_difference_, difference, kBeta1);
    square_difference_ = mix(square_difference_, difference * difference, kBeta2);
    sum_of_shrinking_ += std::pow(kBeta1 * kBeta1 / kBeta2, step_ - 1);
    const double rest_1 = 1 - std::pow(kBeta1, step_);
    const double rest_2 = 1 - std::pow(kBeta2, step_);
    const double c = (1 - kBeta1) / rest_1 * std::sqrt(rest_2 / (1 - kBeta2) * sum_of_shrinking_);
    const double numerator = mean_difference_ / rest_1 + c * std::sqrt(square_difference_ / rest_2);
    const Tensor amplified = numerator / ((square_ / rest_2).sqrt() + kEpsilon);
    sum_ += kLearningRateOfAdamw * amplified.clamp_max(2 * c);
  }

  Tensor value() const { return sum_ + 5 * kSteps * std::ldexp(1.0, -24) * largest_parameter_; }

 private:
  template <typename T>
  static T mix(const T& average, const T& next, double beta) {
    return average * beta + next * (1 - beta);
  }

  double largest_parameter_;
  int step_ = 0;
  Tensor sum_;
  Tensor square_;
  double mean_difference_ = 0;
  double square_difference_ = 0;
  double sum_of_shrinking_ = 0;
};

inline Snapshot adamw_bounds(const Training& alone, double tolerance) {
  Snapshot bounds;
  for (size_t i = 0; i < alone.parameters.size(); ++i) {
    AdamwBound bound(alone.parameters[i]);
    for (size_t step = 0; step < alone.gradients.size(); ++step) {
      const Tensor& gradient = alone.gradients[step][i];
      if (!gradient.defined()) continue;
      bound.add_step(gradient, gradient_tolerance(alone, step, i, tolerance));
    }
    bounds.push_back(bound.value());
  }
  return bounds;
}

inline bool uses_adamw_bound(const Case& test_case) {
  return test_case.optimizer == "adamw" && test_case.dtype == torch::kFloat;
}

inline Snapshot parameter_bounds(const Case& test_case, const Training& alone) {
  const double tolerance = tolerance_of(test_case);
  const double rounding = rounding_share(test_case);
  if (!uses_adamw_bound(test_case)) return share_of_largest(alone.parameters, tolerance + rounding);
  Snapshot bounds = adamw_bounds(alone, tolerance);
  const Snapshot of_rounding = share_of_largest(alone.parameters, rounding);
  for (size_t i = 0; i < bounds.size(); ++i) bounds[i] += of_rounding[i];
  return bounds;
}

// Returns, for each step, by how much the loss of a training on ranks may differ from that of
// `alone`. A difference of the parameters changes a loss to first order by at most the sum over all
// elements of abs(gradient) times the element's bound. Twice that also covers the change of the
// gradient along the way. The bounds of the parameters after the last step are used for all steps.
// A tolerance for the rounding of the sum over the rows is added.
inline std::vector<double> loss_bounds(const Case& test_case, const Training& alone) {
  const Snapshot parameters = parameter_bounds(test_case, alone);
  std::vector<double> bounds;
  for (size_t step = 0; step < alone.losses.size(); ++step) {
    double sum = tolerance_of(test_case) * std::abs(alone.losses[step]);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& gradient = alone.gradients[step][i];
      if (!gradient.defined()) continue;
      sum += 2 * (gradient.to(torch::kDouble).abs() * parameters[i]).sum().item<double>();
    }
    bounds.push_back(sum);
  }
  return bounds;
}

// Returns the largest ratio of |a - b| to its bound over all elements of all tensors; infinity for
// a NaN, or if only one of the two tensors is defined.
inline double used_share(const Snapshot& a, const Snapshot& b, const Snapshot& bounds) {
  double share = 0;
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return std::numeric_limits<double>::infinity();
    if (!a[i].defined()) continue;
    const Tensor difference = (a[i].to(torch::kDouble) - b[i].to(torch::kDouble)).abs();
    const Tensor ratio = torch::where(difference == 0, 0.0, difference / bounds[i]);
    const double worst = ratio.max().item<double>();
    if (std::isnan(worst)) return std::numeric_limits<double>::infinity();
    share = std::max(share, worst);
  }
  return share;
}

// The largest deviations of a training from the reference, each divided by its bound. A training
// counts as equal if no value exceeds 1.
struct Comparison {
  double first_gradients = 0;
  double gradients = 0;  // the largest ratio of all steps
  double parameters = 0;
  // The largest ratio of all losses; 0 unless the training reports the losses of all ranks.
  double losses = 0;
  // The largest difference of a parameter, relative to the largest value of its tensor and not to a
  // bound.
  double relative = 0;
};

inline Comparison compare(const Case& test_case, const Training& trained, const Training& alone) {
  Comparison result;
  for (size_t step = 0; step < alone.gradients.size(); ++step) {
    const Snapshot& expected = alone.gradients[step];
    Snapshot bounds;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double bound = gradient_tolerance(alone, step, i, tolerance_of(test_case));
      bounds.push_back(expected[i].defined() ? torch::full_like(expected[i], bound, torch::kDouble)
                                             : Tensor());
    }
    const double share = used_share(trained.gradients[step], expected, bounds);
    if (step == 0) result.first_gradients = share;
    result.gradients = std::max(result.gradients, share);
  }
  result.parameters =
      used_share(trained.parameters, alone.parameters, parameter_bounds(test_case, alone));
  result.relative =
      used_share(trained.parameters, alone.parameters, share_of_largest(alone.parameters, 1.0));
  return result;
}

// Compares gradients and parameters like compare(), and also the losses. For trainings that report
// the loss over all ranks.
inline Comparison compare_with_losses(const Case& test_case, const Training& trained,
                                      const Training& alone) {
  Comparison result = compare(test_case, trained, alone);
  const std::vector<double> bounds = loss_bounds(test_case, alone);
  for (size_t step = 0; step < bounds.size(); ++step) {
    const double difference = std::abs(trained.losses[step] - alone.losses[step]);
    const double share = difference == 0 ? 0 : difference / bounds[step];
    result.losses = std::max(result.losses,
                             std::isnan(share) ? std::numeric_limits<double>::infinity() : share);
  }
  return result;
}

inline Comparison worse_of(const Comparison& a, const Comparison& b) {
  return {std::max(a.first_gradients, b.first_gradients), std::max(a.gradients, b.gradients),
          std::max(a.parameters, b.parameters), std::max(a.losses, b.losses),
          std::max(a.relative, b.relative)};
}

}  // namespace cadre::testing
