// Runs those recorded operations on which the values of given tensors depend.
//
// Threads: any, for different tapes; random operations that take no generator as an argument run
// under a mutex. Memory: each storage is freed after the last operation that uses it. Errors:
// kInvalidArgument if an operation gives results of another shape, dtype or strides than when it
// was recorded.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cadre/parallel/deferred/tape.h"

namespace cadre {

// Returns the tensors at `places` with the values that they have after the last operation of the
// tape. Tensors at places in one storage share memory.
std::vector<at::Tensor> replay(const Tape& tape, const std::vector<StoragePlace>& places);

// Returns a tensor in `storage` with the dtype, offset, sizes and strides of `place`. The storage
// must be large enough.
at::Tensor tensor_at(const c10::Storage& storage, const StoragePlace& place);
// Returns an uninitialized storage on the CPU.
c10::Storage allocate_storage(size_t num_bytes);

// Runs the operation without autograd and without recording it. `stack` has the arguments before
// the call and the results after it.
void run_unrecorded(const c10::OperatorHandle& handle, std::vector<c10::IValue>& stack);

}  // namespace cadre
