#include "cadre/buckets/gradient_buckets.h"

#include <ATen/core/grad_mode.h>

#include <cstring>
#include <optional>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"

namespace cadre {

namespace {

constexpr size_t kMaxPlainCopyBytes = 64 * 1024;

// A gradient must have its parameter's memory order: libtorch accumulates without a copy only then,
// and its fused optimizers walk both in memory order. To autograd it must not be a view: the
// optimizers' zero_grad() calls detach_(), which refuses views.
at::Tensor gradient_like(const at::Tensor& parameter, const at::Tensor& flat, int64_t offset) {
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + offset)
        .variable_data();
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()).variable_data();
}

}  // namespace

GradientBuckets::GradientBuckets(std::span<const at::Tensor> parameters, BucketLayout layout,
                                 int64_t trailer_numel, ReplicaGroup& group)
    : layout_(std::move(layout)), views_(parameters.size()), bucket_of_(parameters.size()) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    const BucketLayout::Bucket& bucket = layout_.buckets[b];
    const bool is_last = &bucket == &layout_.buckets.back();
    int64_t numel = 0;
    for (const int64_t index : bucket.parameters) numel += parameters[index].numel();
    const at::Tensor flat =
        group.empty_flat(numel + (is_last ? trailer_numel : 0), to_scalar_type(bucket.dtype));
    int64_t offset = 0;
    for (const int64_t index : bucket.parameters) {
      views_[index] = gradient_like(parameters[index], flat, offset);
      bucket_of_[index] = b;
      offset += parameters[index].numel();
    }
    if (is_last) trailer_ = flat.narrow(0, numel, trailer_numel);
    flats_.push_back(flat);
  }
}

bool lies_in(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.const_data_ptr() == view.const_data_ptr() && gradient.strides() == view.strides();
}

// Of a small tensor, most of copy_'s time is its dispatch.
void copy_gradient(const at::Tensor& view, const at::Tensor& gradient) {
  if (gradient.is_cpu() && gradient.nbytes() <= kMaxPlainCopyBytes &&
      gradient.strides() == view.strides() && gradient.is_non_overlapping_and_dense() &&
      !gradient.is_neg()) {
    std::memcpy(view.mutable_data_ptr(), gradient.const_data_ptr(), gradient.nbytes());
  } else {
    view.copy_(gradient);
  }
}

std::vector<ParameterSize> sizes_of(std::span<const at::Tensor> parameters) {
  std::vector<ParameterSize> sizes;
  for (const at::Tensor& parameter : parameters) {
    const std::optional<DType> dtype = to_dtype(parameter.scalar_type());
    if (!dtype) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("a parameter of {} elements is {}, which no group can reduce; use "
                         "float16, bfloat16, float32 or float64",
                         parameter.numel(), c10::toString(parameter.scalar_type())));
    }
    sizes.push_back({.dtype = *dtype, .numel = parameter.numel()});
  }
  return sizes;
}

}  // namespace cadre
