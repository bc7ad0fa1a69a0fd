// Calls libtorch's fused kernels, which update a parameter in one pass over its memory. Before
// that, checks for all inputs that the kernels would accept silently but compute incorrectly.
//
// Threads: one. Blocking: never, also on a device. Lifetime: the lists hold references to their
// tensors. Errors: kInvalidArgument with the parameter's index and name, for a parameter, gradient
// or state for which a kernel would compute a wrong result. The checks modify no tensor. The
// kernels ignore strides and go through memory in order, so parameter, gradient and state need the
// same dtype and memory order. The kernels do not increment version counters, but the functions
// below do. For bfloat16 and float16 the CPU's SGD kernel of torch 2.13 leaves whole vectors of a
// parameter unchanged, so kSgdDtypes lacks these dtypes. Source: at::_fused_adamw_, _fused_adam_,
// _fused_sgd_, _fused_adagrad_.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

// Names a parameter in messages: "cadre::AdamW: parameter 3 (fc.weight)". The name may be empty.
struct ParameterPlace {
  std::string_view optimizer;
  size_t index = 0;
  std::string_view name;
};

// Returns a text such as "parameter 3 (fc.weight)".
std::string to_text(const ParameterPlace& place);
[[noreturn]] void refuse_parameter(const ParameterPlace& place, const std::string& sentence);

inline constexpr at::ScalarType kFloatingDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16,
                                                     at::kHalf};
inline constexpr at::ScalarType kSgdDtypes[] = {at::kDouble, at::kFloat};

// Throws unless `parameter` is a strided tensor of one of `dtypes`, without gaps and overlaps, with
// memory, and not made in inference mode, unless that mode is on.
CADRE_EXPORT void check_parameter(const at::Tensor& parameter, const ParameterPlace& place,
                                  std::span<const at::ScalarType> dtypes);
// Throws unless `gradient` has the parameter's layout, dtype, device and sizes.
CADRE_EXPORT void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                                 const ParameterPlace& place);
// Makes the same checks as check_gradient() for a state tensor, which must be defined.
CADRE_EXPORT void check_state(const at::Tensor& parameter, const at::Tensor& state,
                              std::string_view state_name, const ParameterPlace& place);
// Returns a checked gradient or state in the memory order of `parameter`: the tensor itself, or a
// copy if its order differs or if it is a negated view or a zero tensor without memory.
CADRE_EXPORT at::Tensor in_order_of(const at::Tensor& parameter, const at::Tensor& tensor);

// The arguments of one kernel call. Entry i of every list belongs to the same parameter. On a
// device all tensors of a call are on that device, and its parameters have one dtype.
struct FusedBatch {
  // The kernel updates the parameters in place.
  std::vector<at::Tensor> parameters;
  // The kernel only reads the gradients.
  std::vector<at::Tensor> gradients;
  // One list for each kind of state of the optimizer, such as exp_avg. The kernel updates them in
  // place.
  std::vector<std::vector<at::Tensor>> states;
  // 0-dim step numbers, this step included; empty for SGD. They are float32 on the parameters'
  // device, and float64 on the CPU.
  std::vector<at::Tensor> steps;
};

// How the last elements of a tensor are computed. The kernels use fused multiply-add for whole SIMD
// vectors, but not for the last few elements of a tensor, so the rounding of an element depends on
// where its tensor ends.
enum class TailRounding {
  // The rounding of libtorch's kernels (at::_fused_adamw_ and others).
  kByKernel,
  // All elements are computed as in whole vectors, so the bits of an element do not depend on the
  // slice or tensor that contains it. Each tensor whose size is no multiple of 64 bytes costs some
  // microseconds. Kernels of devices have this rounding anyway.
  kAsWholeVectors,
};

// The functions below call a kernel once on the batch and increment the version counters of the
// parameters.
// REQUIRES: checked tensors in the parameters' order of memory; no two parameters share memory.

struct FusedAdamOptions {
  double learning_rate = 0;
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;
  double epsilon = 0;
  bool amsgrad = false;
  bool decoupled_decay = true;  // AdamW's weight decay, which does not enter the moments
};
// The lists in FusedBatch::states are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
CADRE_EXPORT void run_fused_adam(const FusedBatch& batch, const FusedAdamOptions& options,
                                 TailRounding rounding);

struct FusedSgdOptions {
  double learning_rate = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool is_first_step = false;  // the momentum buffers are only written
};
// The only list in FusedBatch::states is momentum_buffer; none if the momentum is 0.
CADRE_EXPORT void run_fused_sgd(const FusedBatch& batch, const FusedSgdOptions& options,
                                TailRounding rounding);

struct FusedAdagradOptions {
  double learning_rate = 0;
  double rate_decay = 0;
  double weight_decay = 0;
  double epsilon = 0;
};
// The only list in FusedBatch::states is `sum`.
CADRE_EXPORT void run_fused_adagrad(const FusedBatch& batch, const FusedAdagradOptions& options,
                                    TailRounding rounding);

}  // namespace cadre
