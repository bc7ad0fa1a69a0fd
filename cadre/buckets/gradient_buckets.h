// The flat buffers that gradients live in while they are reduced, and each gradient's view of them.
//
// Threads: one at a time. Blocking: the constructor is collective (it allocates symmetric memory).
// Lifetime: a view keeps its bucket's memory alive, also after the GradientBuckets is gone.
// Errors: kInvalidArgument for a parameter whose dtype no group moves.
// The last bucket may have more elements, the trailer, in which the ranks exchange a word without a
// message of its own. Source: c10d's gradient_as_bucket_view.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/buckets/bucket_layout.h"
#include "cadre/wrap/replica_group.h"

namespace cadre {

class CADRE_EXPORT GradientBuckets {
 public:
  // REQUIRES: check_layout_fits(layout, sizes_of(parameters)).
  GradientBuckets(std::span<const at::Tensor> parameters, BucketLayout layout,
                  int64_t trailer_numel, ReplicaGroup& group);

  const BucketLayout& layout() const { return layout_; }
  size_t num_buckets() const { return flats_.size(); }
  // (n) or, for the last bucket, (n + trailer_numel): what is reduced.
  const at::Tensor& flat(size_t bucket) const { return flats_[bucket]; }
  // The gradient of a parameter: its sizes and, where those are dense, its strides.
  const at::Tensor& view(size_t parameter) const { return views_[parameter]; }
  size_t bucket_of(size_t parameter) const { return bucket_of_[parameter]; }
  // (trailer_numel), the last elements of the last bucket.
  const at::Tensor& trailer() const { return trailer_; }

 private:
  BucketLayout layout_;
  std::vector<at::Tensor> flats_;
  std::vector<at::Tensor> views_;
  std::vector<size_t> bucket_of_;
  at::Tensor trailer_;
};

// Whether the gradient is the view's memory, in its order.
CADRE_EXPORT bool lies_in(const at::Tensor& gradient, const at::Tensor& view);
CADRE_EXPORT void copy_gradient(const at::Tensor& view, const at::Tensor& gradient);

CADRE_EXPORT std::vector<ParameterSize> sizes_of(std::span<const at::Tensor> parameters);

}  // namespace cadre
