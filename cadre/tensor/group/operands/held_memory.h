// Keeps the memory of a tensor from being freed while an operation uses it, whatever the program
// does to the tensor meanwhile.
//
// A second handle (at::Tensor) to the same tensor would not be enough: set_data() gives it another
// storage, and resize_() gives its storage other memory and frees the previous one.
// Threads: the rules for a change of the tensor apply; no other thread may use its storage during
// the first call for that storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace cadre {

// Returns an object that keeps the tensor's present memory from being freed; null for an undefined
// tensor. Memory of libtorch's own allocator for the CPU becomes reference-counted and shared by
// the storage and the result. A storage with other memory of the CPU cannot be resized, so the
// result just keeps that storage. It does so for a device, too: CUDA's allocator would ignore
// Tensor::record_stream() for memory with another owner. There a program must not resize_() a
// tensor that an operation uses, as in c10d.
std::shared_ptr<const void> hold_memory(const at::Tensor& tensor);

}  // namespace cadre
