#include "cadre/tensor/hooks/gradient_norm.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <string>
#include <unordered_set>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/power_sum.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {

namespace {

// PyTorch adds this number to avoid a division by a norm of zero.
constexpr double kNormEpsilon = 1e-6;

// Throws for a gradient that mul_() could not scale. All gradients are checked before the first one
// is scaled.
void check_can_be_scaled(const at::Tensor& gradient, size_t index, size_t num_parameters) {
  std::string problem;
  if (gradient.is_inference() && !c10::InferenceMode::is_enabled()) {
    problem = format(
        "the gradient of parameter {} of {}, of sizes {}, was made in inference mode, "
        "outside of which it cannot be changed",
        index, num_parameters, list_of(gradient.sizes()));
  } else if (at::has_internal_overlap(gradient) == at::MemOverlap::Yes) {
    problem = format(
        "elements of the gradient of parameter {} of {}, of sizes {}, share memory, "
        "as after expand(), so they cannot be scaled one by one",
        index, num_parameters, list_of(gradient.sizes()));
  }
  if (problem.empty()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("clip_grad_norm_: {}; assign its clone() to the parameter's mutable_grad()", problem));
}

// Returns whether the tensor is a view with a pending conjugation or negation, which at::_foreach
// functions do not support.
bool is_lazy(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg();
}

std::vector<at::Tensor> gradients_of(std::span<const at::Tensor> parameters) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].defined()) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("clip_grad_norm_: parameter {} of {} is an undefined tensor; pass the "
                         "parameters of a module, model->parameters()",
                         i, parameters.size()));
    }
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined() || !seen.insert(parameters[i].unsafeGetTensorImpl()).second) continue;
    if (gradient.layout() != at::kStrided) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("clip_grad_norm_: the gradient of parameter {} of {}, of sizes {}, is not "
                         "dense; make it dense, for example by an embedding with sparse(false)",
                         i, parameters.size(), list_of(parameters[i].sizes())));
    }
    check_can_be_scaled(gradient, i, parameters.size());
    // The norm of an empty tensor is 0, but libtorch has no maximum of an empty tensor.
    if (gradient.numel() == 0) continue;
    // A zero tensor without memory cannot be scaled in place, so it is replaced by real zeros. They
    // must be scaled too: a norm that is NaN turns them into NaN.
    if (gradient._is_zerotensor()) parameters[i].mutable_grad() = gradient.clone();
    gradients.push_back(gradient);
  }
  return gradients;
}

double joint_norm(const std::vector<at::Tensor>& gradients, double p) {
  return wrap::norm_of_power_sum(wrap::power_sum(gradients, p), p);
}

[[noreturn]] void refuse_nonfinite(double norm, double norm_type,
                                   const std::vector<at::Tensor>& gradients) {
  std::string cause = "every element is finite, so the sum of their powers exceeds float64";
  for (const at::Tensor& gradient : gradients) {
    if (at::isfinite(gradient).all().item<bool>()) continue;
    cause = format("the first gradient with an element that is not finite has sizes {}",
                   list_of(gradient.sizes()));
    break;
  }
  throw Error(ErrorCode::kInvalidArgument,
              format("clip_grad_norm_: the {}-norm of {} gradients is {}; {}. No gradient was "
                     "scaled. Lower the learning rate or the scale of the loss, or leave out this "
                     "step",
                     norm_type, gradients.size(), norm, cause));
}

}  // namespace

void check_clip_options(double max_norm, const ClipGradNormOptions& options) {
  if (!(options.norm_type > 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("clip_grad_norm_: norm_type is {}; give a number > 0, or infinity for the "
                       "largest absolute value",
                       options.norm_type));
  }
  if (!(max_norm >= 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                format("clip_grad_norm_: max_norm is {}; give a number >= 0, or infinity for no "
                       "limit",
                       max_norm));
  }
}

void limit_gradients(const std::vector<at::Tensor>& gradients, double norm, double max_norm) {
  if (gradients.empty() || std::isinf(max_norm) || norm <= max_norm) return;
  const double factor = max_norm / (norm + kNormEpsilon);
  std::vector<at::Tensor> in_memory;
  for (const at::Tensor& gradient : gradients) {
    if (is_lazy(gradient)) {
      gradient.mul_(factor);
    } else {
      in_memory.push_back(gradient);
    }
  }
  if (!in_memory.empty()) at::_foreach_mul_(in_memory, factor);
}

double clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                       const ClipGradNormOptions& options) {
  check_clip_options(max_norm, options);
  wrap::refuse_shards(parameters, "clip_grad_norm_", ", max_norm");
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = gradients_of(parameters);
  if (gradients.empty()) return 0;
  const double norm = joint_norm(gradients, options.norm_type);
  if (options.error_if_nonfinite && !std::isfinite(norm)) {
    refuse_nonfinite(norm, options.norm_type, gradients);
  }
  limit_gradients(gradients, norm, max_norm);
  return norm;
}

}  // namespace cadre
