#include "cadre/tensor/optim/fused_kernels.h"

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/operations/parameter_uses.h"

namespace cadre {
namespace {

// The size of the largest SIMD register of a CPU. The kernels divide a tensor among threads at
// multiples of it.
constexpr int64_t kVectorBytes = 64;

// Returns a text such as "dense Float (2, 3) on cpu".
std::string describe(const at::Tensor& tensor) {
  return cadre::format("{} {} {} on {}", tensor.layout() == at::kStrided ? "dense" : "sparse",
                       c10::toString(tensor.scalar_type()), list_of(tensor.sizes()),
                       tensor.device().str());
}

bool fits(const at::Tensor& parameter, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.scalar_type() == parameter.scalar_type() &&
         tensor.device() == parameter.device() && tensor.sizes() == parameter.sizes();
}

// Returns a 1-dim tensor over this memory, which must outlive it.
at::Tensor flat(std::byte* data, int64_t numel, at::ScalarType dtype) {
  return at::from_blob(data, {numel}, at::TensorOptions().dtype(dtype));
}

// A copy of a batch in which every tensor consists of whole SIMD vectors. The tail of a tensor (its
// last elements, fewer than a vector) is copied to a zero-padded row of scratch memory, and that
// row is an additional entry of the batch.
class PaddedBatch {
 public:
  explicit PaddedBatch(const FusedBatch& batch) {
    padded_.states.resize(batch.states.size());
    const int64_t num_tails =
        std::count_if(batch.parameters.begin(), batch.parameters.end(),
                      [](const at::Tensor& parameter) { return tail_bytes(parameter) != 0; });
    const auto num_roles = static_cast<int64_t>(2 + batch.states.size());
    if (num_tails > 0) scratch_ = at::zeros({num_tails * num_roles * kVectorBytes}, at::kByte);
    if (num_tails > 0) next_row_ = static_cast<std::byte*>(scratch_.mutable_data_ptr());
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const size_t num_entries = add(batch.parameters[i], padded_.parameters);
      add(batch.gradients[i], padded_.gradients);
      for (size_t k = 0; k < batch.states.size(); ++k) add(batch.states[k][i], padded_.states[k]);
      if (!batch.steps.empty()) {
        padded_.steps.insert(padded_.steps.end(), num_entries, batch.steps[i]);
      }
    }
  }

  const FusedBatch& batch() const { return padded_; }

  // Copies the updated tails back to their tensors.
  void write_back() const {
    for (const Tail& tail : tails_) std::memcpy(tail.home, tail.row, tail.num_bytes);
  }

 private:
  struct Tail {
    std::byte* home;
    std::byte* row;
    size_t num_bytes;
  };

  static int64_t tail_bytes(const at::Tensor& tensor) {
    return static_cast<int64_t>(tensor.nbytes()) % kVectorBytes;
  }

  // Appends the tensor to the list as one entry, or as two: whole vectors and tail. Returns the
  // number of entries.
  size_t add(const at::Tensor& tensor, std::vector<at::Tensor>& list) {
    const int64_t num_tail_bytes = tail_bytes(tensor);
    if (num_tail_bytes == 0) {
      list.push_back(tensor);
      return 1;
    }
    const size_t num_before = list.size();
    const int64_t item_bytes = static_cast<int64_t>(tensor.element_size());
    const int64_t num_body_bytes = static_cast<int64_t>(tensor.nbytes()) - num_tail_bytes;
    auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
    if (&list == &padded_.parameters) wrap::tell_written(tensor);
    if (num_body_bytes > 0) {
      list.push_back(flat(data, num_body_bytes / item_bytes, tensor.scalar_type()));
    }
    const Tail tail = {data + num_body_bytes, next_row_, static_cast<size_t>(num_tail_bytes)};
    std::memcpy(tail.row, tail.home, tail.num_bytes);
    list.push_back(flat(tail.row, kVectorBytes / item_bytes, tensor.scalar_type()));
    if (&list != &padded_.gradients) tails_.push_back(tail);
    next_row_ += kVectorBytes;
    return list.size() - num_before;
  }

  FusedBatch padded_;
  at::Tensor scratch_;
  std::byte* next_row_ = nullptr;
  std::vector<Tail> tails_;
};

void run_fused(const FusedBatch& batch, TailRounding rounding,
               const std::function<void(const FusedBatch&)>& kernel) {
  // Kernels of devices compute each element alone.
  const bool is_on_cpu = batch.parameters.empty() || batch.parameters.front().is_cpu();
  if (rounding == TailRounding::kByKernel || !is_on_cpu) {
    kernel(batch);
  } else {
    const PaddedBatch padded(batch);
    kernel(padded.batch());
    padded.write_back();
  }
  for (const at::Tensor& parameter : batch.parameters) {
    // A tensor made in inference mode has no version counter.
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

std::string to_text(const ParameterPlace& place) {
  return place.name.empty() ? cadre::format("parameter {}", place.index)
                            : cadre::format("parameter {} ({})", place.index, place.name);
}

void refuse_parameter(const ParameterPlace& place, const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", place.optimizer, sentence));
}

void check_parameter(const at::Tensor& parameter, const ParameterPlace& place,
                     std::span<const at::ScalarType> dtypes) {
  if (parameter.layout() != at::kStrided || parameter.is_meta()) {
    refuse_parameter(place, cadre::format("{} is {}; expected a dense tensor with values. Use the "
                                          "optimizer of torch::optim for it",
                                          to_text(place), describe(parameter)));
  }
  if (std::find(dtypes.begin(), dtypes.end(), parameter.scalar_type()) == dtypes.end()) {
    std::string known;
    for (const at::ScalarType dtype : dtypes) {
      known += cadre::format(known.empty() ? "{}" : ", {}", c10::toString(dtype));
    }
    refuse_parameter(
        place, cadre::format("{} is {}, which the fused kernel does not compute; it computes {}. "
                             "Use the optimizer of torch::optim for it, or keep the parameter in "
                             "Float",
                             to_text(place), describe(parameter), known));
  }
  if (parameter._is_zerotensor()) {
    refuse_parameter(place, cadre::format("{} is a zero tensor without memory; expected memory of "
                                          "its own. Make the parameter from its clone()",
                                          to_text(place)));
  }
  if (parameter.is_inference() && !c10::InferenceMode::is_enabled()) {
    refuse_parameter(place, cadre::format("{} was made in inference mode, outside of which it "
                                          "cannot be changed. Make the parameter from its clone()",
                                          to_text(place)));
  }
  if (!parameter.is_non_overlapping_and_dense() || parameter.is_neg()) {
    refuse_parameter(
        place, cadre::format(
                   "{} has strides {} for sizes {}, a view with gaps or overlaps or a negated one; "
                   "expected memory of its own. Make the parameter from a contiguous tensor",
                   to_text(place), list_of(parameter.strides()), list_of(parameter.sizes())));
  }
}

void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                    const ParameterPlace& place) {
  if (fits(parameter, gradient)) return;
  refuse_parameter(
      place, cadre::format("the gradient of {} is {}; expected {}, as the parameter. Convert the "
                           "gradient before the step",
                           to_text(place), describe(gradient), describe(parameter)));
}

void check_state(const at::Tensor& parameter, const at::Tensor& state, std::string_view state_name,
                 const ParameterPlace& place) {
  if (!state.defined()) {
    refuse_parameter(
        place, cadre::format("the state of {} has no {}, which its options need. Set the options "
                             "before the first step, or load a state that was saved with them",
                             to_text(place), state_name));
  }
  if (fits(parameter, state)) return;
  refuse_parameter(
      place, cadre::format("the state {} of {} is {}; expected {}, as the parameter. Load the "
                           "state of this model, or clear the optimizer's state",
                           state_name, to_text(place), describe(state), describe(parameter)));
}

at::Tensor in_order_of(const at::Tensor& parameter, const at::Tensor& tensor) {
  const bool same = tensor.strides() == parameter.strides() ||
                    (tensor.is_contiguous() && parameter.is_contiguous());
  const bool is_in_memory = !tensor.is_neg() && !tensor._is_zerotensor();
  return same && is_in_memory ? tensor : at::empty_like(parameter).copy_(tensor);
}

void run_fused_adam(const FusedBatch& batch, const FusedAdamOptions& options,
                    TailRounding rounding) {
  const auto call =
      options.decoupled_decay ? at::_ops::_fused_adamw_::call : at::_ops::_fused_adam_::call;
  run_fused(batch, rounding, [&](const FusedBatch& lists) {
    call(lists.parameters, lists.gradients, lists.states[0], lists.states[1],
         options.amsgrad ? at::TensorList(lists.states[2]) : at::TensorList(), lists.steps,
         options.learning_rate, options.beta1, options.beta2, options.weight_decay, options.epsilon,
         options.amsgrad, /*maximize=*/false, /*grad_scale=*/std::nullopt,
         /*found_inf=*/std::nullopt);
  });
}

void run_fused_sgd(const FusedBatch& batch, const FusedSgdOptions& options, TailRounding rounding) {
  run_fused(batch, rounding, [&](const FusedBatch& lists) {
    at::_fused_sgd_(lists.parameters, lists.gradients,
                    lists.states.empty() ? at::TensorList() : at::TensorList(lists.states[0]),
                    options.weight_decay, options.momentum, options.learning_rate,
                    options.dampening, options.nesterov, /*maximize=*/false, options.is_first_step);
  });
}

void run_fused_adagrad(const FusedBatch& batch, const FusedAdagradOptions& options,
                       TailRounding rounding) {
  run_fused(batch, rounding, [&](const FusedBatch& lists) {
    at::_fused_adagrad_(lists.parameters, lists.gradients, lists.states[0], lists.steps,
                        options.learning_rate, options.rate_decay, options.weight_decay,
                        options.epsilon, /*maximize=*/false);
  });
}

}  // namespace cadre
