// Makes the replicas of a model equal before training: checks that all ranks have the same
// parameters and buffers, then broadcasts rank 0's values.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: kInvalidArgument naming
// the first tensor that differs, the same sentence on all ranks.
// Source: c10d's _verify_param_shape_across_processes and _sync_module_states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

struct ReplicaTensors {
  std::span<const NamedTensor> parameters;
  std::span<const NamedTensor> buffers;
};

// Throws unless the names, shapes, strides, dtypes, types of device and requires_grad of all
// parameters and buffers are the same on all ranks. If a tensor is marked as a shard
// (shard_mark.h), all ranks must hold the same shard. `wrapper`: the name with which the error
// begins; static text.
void check_replicas_match(const char* wrapper, const ReplicaTensors& tensors,
                          const LocatedGroup& group);

// Gives all ranks the values of rank `root`, in few messages. Any dtype. A tensor that gets other
// values counts as changed in place: the backward of a graph that has saved it throws.
void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group);

// Gives all ranks the root's values. `moves_version(i)` decides whether a change of tensors[i]
// counts as a change in place, which increments its version counter. The function is called when
// the tensors before i have their values, so it may read them. A tensor that already has the right
// values is not written, unless it is on a device.
void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group,
                       const std::function<bool(size_t)>& moves_version);

// The first tensor whose values are not the same on all ranks, and the first rank whose values
// differ from rank 0's. All ranks get the same result, from a comparison of 64-bit hashes.
struct UnlikeTensor {
  size_t place;  // the index in `tensors`
  int rank;
};
std::optional<UnlikeTensor> first_unlike(std::span<const at::Tensor> tensors,
                                         const LocatedGroup& group);

}  // namespace cadre::wrap
