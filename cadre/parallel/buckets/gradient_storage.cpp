#include "cadre/parallel/buckets/gradient_storage.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace cadre {

namespace {

// The size of the chunks in which memcpy copies a gradient, in parallel. copy_() of a small tensor
// spends most of its time on dispatch. For a large tensor, memcpy takes two thirds of the time of
// copy_(), because it writes cache lines without reading them first.
constexpr size_t kCopiedBytes = 256 * 1024;

void copy_gradient(const at::Tensor& target, const at::Tensor& gradient) {
  const bool is_plain = gradient.is_cpu() && gradient.scalar_type() == target.scalar_type() &&
                        gradient.strides() == target.strides() &&
                        gradient.is_non_overlapping_and_dense() && !gradient.is_neg();
  if (!is_plain) {
    target.copy_(gradient);
    return;
  }
  auto* const to = static_cast<std::byte*>(target.mutable_data_ptr());
  const auto* const from = static_cast<const std::byte*>(gradient.const_data_ptr());
  const size_t size = gradient.nbytes();
  const auto num_parts = static_cast<int64_t>((size + kCopiedBytes - 1) / kCopiedBytes);
  at::parallel_for(0, num_parts, /*grain_size=*/1, [&](int64_t first, int64_t end) {
    for (int64_t part = first; part < end; ++part) {
      const size_t begin = static_cast<size_t>(part) * kCopiedBytes;
      std::memcpy(to + begin, from + begin, std::min(kCopiedBytes, size - begin));
    }
  });
}

}  // namespace

void GradientStorage::begin_pass(const Combination& combination) {
  combination_ = combination;
  num_launched_ = 0;
  on_begin_pass();
}

void GradientStorage::set_layout(BucketLayout layout) {
  layout_ = std::move(layout);
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    for (const int64_t parameter : layout_.buckets[b].parameters) bucket_of_[parameter] = b;
  }
}

void write_gradient(const at::Tensor& target, const at::Tensor& gradient, double factor) {
  if (factor == 0.0) {
    target.zero_();  // a mean over no samples may be NaN, and 0 * NaN is NaN
  } else if (factor == 1.0) {
    copy_gradient(target, gradient);
  } else if (gradient.scalar_type() == target.scalar_type()) {
    at::Tensor out = target;
    // The factor is a 0-dim double, which does not promote the result's dtype. In bfloat16 it would
    // be rounded, and the factors of the ranks would not sum to one.
    at::mul_out(out, gradient, at::scalar_tensor(factor, at::kDouble));
  } else {
    // The gradient is converted before the multiplication, so that the product is rounded in the
    // target's dtype.
    target.copy_(gradient);
    target.mul_(factor);
  }
}

}  // namespace cadre
