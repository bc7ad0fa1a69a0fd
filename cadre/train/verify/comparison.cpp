#include "cadre/train/verify/comparison.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::verify {
namespace {

double share_of(double difference, double bound) {
  if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
  return difference == 0 ? 0 : difference / bound;
}

// Computes |actual - expected| / scale for each element. Returns it for the element that uses the
// largest share of its bound.
UsedBound compare(const at::Tensor& actual, const ReferenceTensor& expected) {
  const at::Tensor difference =
      (actual.detach().to(at::kDouble) - expected.values.to(at::kDouble)).abs().flatten();
  if (difference.numel() == 0) return {.share = 0, .deviation = {.bound = expected.bound}};
  const auto relative = [&](double value) {
    return value == 0 ? 0 : value / expected.scale;  // the result is infinite if the scale is 0
  };
  if (!expected.bounds.defined()) {
    // max() is NaN if any element is NaN.
    const double largest = relative(difference.max().item<double>());
    return {.share = share_of(largest, expected.bound),
            .deviation = {.difference = largest, .bound = expected.bound}};
  }
  const at::Tensor bounds = expected.bounds.to(at::kDouble).flatten() * expected.scale;
  const at::Tensor shares =
      at::where(difference == 0, at::zeros_like(difference), difference / bounds);
  // argmax() returns the index of a NaN, if there is one.
  const int64_t worst = shares.argmax().item<int64_t>();
  const double value = relative(difference[worst].item<double>());
  const double bound = expected.bounds.flatten()[worst].item<double>();
  return {.share = share_of(value, bound), .deviation = {.difference = value, .bound = bound}};
}

}  // namespace

void keep_worse(UsedBound& kept, const UsedBound& other) {
  const bool both_exceed = kept.share > 1 && other.share > 1;
  if (both_exceed && other.deviation.step != kept.deviation.step) {
    if (other.deviation.step < kept.deviation.step) kept = other;
  } else if (other.share > kept.share) {
    kept = other;
  }
}

void Comparison::add_loss(int64_t step, double loss) {
  const ReferenceStep& expected = reference_.steps[static_cast<size_t>(step - 1)];
  const double absolute = std::abs(loss - expected.loss);
  const double difference = absolute == 0 ? 0 : absolute / std::abs(expected.loss);
  UsedBound used{.share = share_of(difference, expected.loss_bound),
                 .deviation = {.difference = difference,
                               .bound = expected.loss_bound,
                               .name = {},
                               .step = step,
                               .rank = rank_}};
  keep_worse(loss_, used);
}

void Comparison::add_gradients(int64_t step, std::span<const NamedTensor> gradients) {
  const ReferenceStep& expected = reference_.steps[static_cast<size_t>(step - 1)];
  add(gradients_, {"parameter", reference_.names, expected.gradients, gradients}, step);
}

void Comparison::add_parameters(int64_t step, std::span<const NamedTensor> parameters) {
  const ReferenceStep& expected = reference_.steps[static_cast<size_t>(step - 1)];
  add(parameters_, {"parameter", reference_.names, expected.parameters, parameters}, step);
}

void Comparison::add_buffers(int64_t step, std::span<const NamedTensor> buffers) {
  if (buffers.empty()) return;
  const ReferenceStep& expected = reference_.steps[static_cast<size_t>(step - 1)];
  add(buffers_, {"buffer", reference_.buffer_names, expected.buffers, buffers}, step);
}

void Comparison::add(UsedBound& kept, const Tensors& tensors, int64_t step) const {
  const at::NoGradGuard no_grad;
  const auto& [kind, names, expected, actual] = tensors;
  for (const NamedTensor& tensor : actual) {
    if (std::ranges::find(names, tensor.name) != names.end()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("this training has a {} \"{}\", which the reference lacks: make_module() "
                       "must make the same module in every call",
                       kind, tensor.name));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const std::string& name = names[i];
    const auto found = std::ranges::find(actual, name, &NamedTensor::name);
    if (found == actual.end()) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("the reference has a {} \"{}\", which this training lacks: "
                         "make_module() must make the same module in every call",
                         kind, name));
    }
    const at::Tensor& values = expected[i].values;
    if (!found->tensor.defined() && !values.defined()) continue;
    // An undefined gradient is compared as if it were zeros. If an optimizer distinguishes the two,
    // the parameters will differ after the update.
    const ReferenceTensor whole{.values = values.defined() ? values : at::zeros_like(found->tensor),
                                .scale = expected[i].scale,
                                .bound = expected[i].bound,
                                .bounds = expected[i].bounds};
    const at::Tensor own = found->tensor.defined() ? found->tensor : at::zeros_like(whole.values);
    if (own.sizes() != whole.values.sizes()) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("{} \"{}\" has other sizes than in the reference: make_module() must "
                         "make the same module in every call",
                         kind, name));
    }
    UsedBound used = compare(own, whole);
    used.deviation.name = name;
    used.deviation.step = step;
    used.deviation.rank = rank_;
    keep_worse(kept, used);
  }
}

}  // namespace cadre::verify
