// Computes the values of deferred tensors, on each rank or on one rank for all.
//
// Threads: as the module. Blocking: materialize_from() is a collective, until the group's deadline.
// Lifetime: the tensors stay the same objects, with the same autograd state and version counter.
// Errors: kInvalidArgument, with the name of the tensor, for a tensor on the meta device that is
// not deferred.
#pragma once

#include <c10/core/Device.h>

#include <span>
#include <string_view>

#include "cadre/core/base/types.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

// Throws if one of the tensors is on the meta device and not deferred, as the functions below do,
// but changes no tensor.
void check_materializable(std::string_view caller, std::span<const NamedTensor> tensors);

// Computes the values of the deferred tensors in the list. Other tensors do not change. caller: the
// beginning of the error text.
void materialize_tensors(std::string_view caller, std::span<const NamedTensor> tensors);

// Computes the values of deferred tensors on rank `root` only, and broadcasts the values of all
// tensors in the list from it. Each rank needs memory for the tensors, and the root also for the
// intermediate results of the operations.
void materialize_from(std::string_view caller, std::span<const NamedTensor> tensors, Rank root,
                      const wrap::LocatedGroup& group);

// Moves the tensors that are on another device to `device`. The tensors stay the same objects, and
// tensors that shared memory share it again.
void move_tensors(std::span<const NamedTensor> tensors, c10::Device device);

}  // namespace cadre
