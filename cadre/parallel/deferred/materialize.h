// Gives deferred tensors their values.
//
// Threads: as the module. Blocking: materialize_from() is collective, until the group's deadline.
// Lifetime: the tensors keep their identity, autograd state and version.
// Errors: kInvalidArgument naming a tensor on the meta device that is not deferred.
#pragma once

#include <span>
#include <string_view>

#include "cadre/core/base/types.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

// Throws the errors that the functions below would throw, before anything is changed.
void check_materializable(std::string_view caller, std::span<const NamedTensor> tensors);

// Gives deferred tensors their values; other tensors stay as they are. caller: the name with which
// an error begins.
void materialize_tensors(std::string_view caller, std::span<const NamedTensor> tensors);

// Gives all ranks the values of rank `root`, which alone computes those of deferred tensors.
// Memory: all of the tensors, and on the root what their operations use.
void materialize_from(std::string_view caller, std::span<const NamedTensor> tensors, Rank root,
                      const wrap::LocatedGroup& group);

}  // namespace cadre
