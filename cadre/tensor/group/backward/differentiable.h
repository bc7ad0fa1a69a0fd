// Differentiable collectives: each returns a new tensor, and its backward runs the adjoint
// collective on the same group.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward(). Collectives run
// in backward in the reverse of their order in forward, if one thread of the rank made them.
// Blocking: until the collective is done, in forward and in backward. Lifetime: the graph keeps the
// group. Errors: cadre::Error; kInvalidArgument for a tensor that the operation does not support,
// or, while gradients are recorded, for an operation without a backward. backward() throws an error
// whose message begins with "backward of" and the operation. Tensors: as ProcessGroup takes them,
// contiguous or not, and also negated views and zero tensors without memory, which are copied; the
// result is contiguous and shares no memory with the input, with the exception of copy_to_group.
// Integers and bool: no gradient. Ranks are group ranks.
// Source: torch.distributed.nn.functional, names of torch.distributed._functional_collectives;
// Megatron-LM, https://arxiv.org/abs/1909.08053.
// docs/guide/reference/differentiable-collectives.md has the table of backwards and the
// differences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::functional {

// The functions from all_reduce() to broadcast() compute the gradient of the SUM of all ranks'
// losses. While GradMode is on and the input is floating-point, the result requires grad on every
// rank, whether or not this rank's input does, so that every rank takes part in backward. Backward
// runs a collective, so on every rank the result must contribute to the tensor on which backward()
// is called. A timeout in the options applies to the forward; the backward has the group's timeout.

// SUM, AVG, PREMUL_SUM, MAX and MIN have a backward; PRODUCT throws while gradients are recorded.
// The gradient of MAX and MIN goes to the ranks that hold the extremum, in equal parts if several
// do, like that of at::amax; it is NaN if the result is NaN.
CADRE_EXPORT at::Tensor all_reduce(const at::Tensor& input, const ProcessGroup& group,
                                   const AllReduceOptions& options = {});
// Concatenates the inputs of all ranks along dimension 0. input: (n, ...) or (), of one shape on
// all ranks; result: (world_size * n, ...) or (world_size).
CADRE_EXPORT at::Tensor all_gather(const at::Tensor& input, const ProcessGroup& group,
                                   const AllGatherOptions& options = {});
// Reduces the inputs of all ranks and returns part `rank` of the result. input: (world_size * n,
// ...); result: (n, ...). SUM, AVG and PREMUL_SUM have a backward; the others throw while gradients
// are recorded.
CADRE_EXPORT at::Tensor reduce_scatter(const at::Tensor& input, const ProcessGroup& group,
                                       const ReduceScatterOptions& options = {});
// Sends rows of the input to each rank. input: (n, ...), where n is the sum of the input splits;
// result: (m, ...), where m is the sum of the output splits. If splits are given for one side only,
// the rows of the other side are divided evenly; without output splits m is n.
CADRE_EXPORT at::Tensor all_to_all(const at::Tensor& input, const ProcessGroup& group,
                                   const AllToAllOptions& options = {});
// The result is the root's input. On other ranks only the input's shape and dtype are used; its
// gradient is zero.
CADRE_EXPORT at::Tensor broadcast(const at::Tensor& input, const ProcessGroup& group,
                                  const BroadcastOptions& options = {});

// The functions below compute the gradient of ONE loss that all ranks compute identically, as in
// tensor parallelism, where a group divides the work of one process. A "replicated" tensor has
// equal values on all ranks. Its requires_grad must be equal too, because it decides whether the
// backward runs a collective.

struct ReduceFromGroupOptions {
  std::optional<Duration> timeout = {};
};
struct DimensionOptions {
  int64_t dim = -1;
  std::optional<Duration> timeout = {};
};

// Megatron's f, used before a layer with divided weights. Forward: the identity; backward:
// all_reduce with SUM. input: replicated, any shape. While gradients are recorded the result is a
// view of the input, and autograd throws if either is changed in place; otherwise it is the input
// itself.
CADRE_EXPORT at::Tensor copy_to_group(const at::Tensor& input, const ProcessGroup& group);
// Megatron's g, used after a layer with divided weights. Forward: all_reduce with SUM; backward:
// the identity. The result is replicated.
CADRE_EXPORT at::Tensor reduce_from_group(const at::Tensor& input, const ProcessGroup& group,
                                          const ReduceFromGroupOptions& options = {});
// Divides the input into world_size equal parts along `dim` and returns part `rank`; backward:
// gather_from_group. input: replicated. No communication in forward.
CADRE_EXPORT at::Tensor scatter_to_group(const at::Tensor& input, const ProcessGroup& group,
                                         const DimensionOptions& options = {});
// Returns the inputs of all ranks, which have one shape, concatenated along `dim`; backward:
// scatter_to_group. The result is replicated.
CADRE_EXPORT at::Tensor gather_from_group(const at::Tensor& input, const ProcessGroup& group,
                                          const DimensionOptions& options = {});

}  // namespace cadre::functional
