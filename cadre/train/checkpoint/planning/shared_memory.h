// Finds tensors that are about to be filled and share memory: elements that two of them share would
// keep only the values of the one that is filled last.
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
  at::Tensor target;  // is dense and on the CPU, with any strides; its elements do not overlap
  // Returns a contiguous tensor of shape (numel) and of the target's dtype.
  std::function<at::Tensor()> values;
};

// Throws if an element of memory that several targets share would get different values, compared
// bit for bit. Targets without a common element are accepted, also if they interleave.
void check_shared_memory(std::span<const PlannedWrite> writes);

}  // namespace cadre
