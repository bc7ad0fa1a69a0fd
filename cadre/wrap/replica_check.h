// Makes replicas equal before training: checks that all ranks hold the same model, then copies rank
// 0's values.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: kInvalidArgument naming
// the first tensor that differs, the same sentence on all ranks.
// Source: c10d's _verify_param_shape_across_processes and _sync_module_states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "cadre/wrap/located_group.h"
#include "cadre/wrap/named_tensors.h"

namespace cadre::wrap {

struct ReplicaTensors {
  std::span<const NamedTensor> parameters;
  std::span<const NamedTensor> buffers;
};

// Names, shapes, strides, dtypes and requires_grad of parameters, and of buffers, are the same on
// all ranks, and so is the shard of a tensor that is marked as one. `wrapper`: the name with which
// the error begins. Returns a number of the wrapper that is the same on all ranks, and another one
// for each wrapper of a group: how many operations the group had run before it.
uint64_t check_replicas_match(std::string_view wrapper, const ReplicaTensors& tensors,
                              const LocatedGroup& group);

// Rank `root`'s values everywhere, in few messages. Any dtype. Versions do not change.
void broadcast_tensors(std::span<const NamedTensor> tensors, Rank root, const LocatedGroup& group);

}  // namespace cadre::wrap
