// Finds tensors that are about to be filled and share memory: the one that is filled last would
// decide about the elements that both have.
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
  at::Tensor target;                   // dense, on the CPU, any strides; no element in it twice
  std::function<at::Tensor()> values;  // (numel), contiguous, of the target's dtype
};

// Throws unless each element of memory that several targets have gets one value from all of them,
// bit for bit. Targets without a common element, also interleaved ones, are accepted.
void check_shared_memory(std::span<const PlannedWrite> writes);

}  // namespace cadre
