// Finds tensors that share memory before a load fills them. An element that two of them share would
// keep only the value of the tensor that is filled last.
//
// Threads: pure functions. Blocking: never; reads the values of tensors that may share memory.
// Lifetime: keeps nothing. Errors: kInvalidArgument with both names, before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>

namespace cadre {

struct PlannedWrite {
  std::string name;
  at::Tensor target;  // dense, on any device, with any strides; its own elements do not overlap
  // Returns the values to write to `target` as a contiguous CPU tensor of shape (numel) and of
  // the target's dtype.
  std::function<at::Tensor()> values;
};

// Throws if two targets share an element for which they have different values, compared bit for
// bit. Accepts targets without a common element, even if their elements interleave in memory.
void check_shared_memory(std::span<const PlannedWrite> writes);

}  // namespace cadre
