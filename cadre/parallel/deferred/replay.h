// Runs the recorded operations that the values of some tensors depend on, and no others.
//
// Threads: any, for different tapes. Blocking: never; operations that draw random numbers without
// taking a generator as an argument exclude each other.
// Memory: a storage is freed after the last operation that uses it.
// Errors: kInvalidArgument where an operation gives other results than when it was recorded.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cadre/parallel/deferred/tape.h"

namespace cadre {

// Returns the tensors at `places` as they are after the last operation. Places in one storage share
// memory.
std::vector<at::Tensor> replay(const Tape& tape, const std::vector<Place>& places);

// Returns a tensor of the place's form in a storage that has at least its size.
at::Tensor tensor_at(const c10::Storage& storage, const Place& place);
// Returns a storage on the CPU, not initialized.
c10::Storage allocate_storage(size_t num_bytes);

// Runs the operation on the arguments in `stack`, without autograd and without recording, and
// leaves the results there.
void run_unrecorded(const c10::OperatorHandle& handle, std::vector<c10::IValue>& stack);

}  // namespace cadre
