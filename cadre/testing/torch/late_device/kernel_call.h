// Runs operators of the CPU as kernels of the late device.
//
// Arguments are checked and results are allocated in the caller, for which the operator first runs
// there on zeros of the same shapes. The kernel then runs on the current stream of the device.
//
// Operators whose result, or its shape, depends on values (nonzero, masked_select) wait for the
// stream and run in the caller; the counters have their names.
//
// Threads: any. Errors, thrown in the caller: tensors of two devices, or of a device and the CPU
// (numbers and indices may be of the CPU); operators that return views and have no kernel in
// tensor_kernels.cpp; operators that draw random numbers and have no generator argument; what the
// operator throws on zeros. What it throws on the real values, such as an index out of range, is
// thrown by the next synchronisation of the stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace cadre::testing::late {

bool is_late(const at::Tensor& tensor);

// Returns a CPU tensor over the memory of a tensor of the device, for tasks on streams. It does not
// keep the memory alive.
at::Tensor view_for_stream(const at::Tensor& tensor);

// Runs `op` late and returns its results.
torch::jit::Stack run_kernel(const c10::OperatorHandle& op, torch::jit::Stack arguments);

}  // namespace cadre::testing::late
