// Copies of tensors in one flat tensor for each dtype and device, so that a model is exchanged in
// few messages.
//
// Threads: one. Blocking: means_over() is collective. Lifetime: copies. Errors: those of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cadre/tensor/group/process_group.h"

namespace cadre::averaging {

class FlatCopies {
 public:
  explicit FlatCopies(const std::vector<at::Tensor>& tensors);

  // Each has the shape (n).
  const std::vector<at::Tensor>& flats() const { return flats_; }
  // Returns the part of `flats` that belongs to each tensor, in its shape. flats: those of this
  // object, or others of the same sizes.
  std::vector<at::Tensor> parts_of(const std::vector<at::Tensor>& flats) const;

 private:
  struct Place {
    size_t flat;
    int64_t offset;
    std::vector<int64_t> sizes;
  };
  std::vector<at::Tensor> flats_;
  std::vector<Place> places_;
};

// Returns the means over the ranks of the group.
std::vector<at::Tensor> means_over(const ProcessGroup& group,
                                   const std::vector<at::Tensor>& tensors);

}  // namespace cadre::averaging
