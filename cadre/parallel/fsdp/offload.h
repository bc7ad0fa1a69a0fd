// Opens the files of FileOffload, on all ranks or on none.
//
// Threads: one. Blocking: open_offload() is collective, until the group's deadline. Lifetime: keeps
// nothing. Errors: kUnavailable on all ranks if one of them has no folder or no disk space.
#pragma once

#include <memory>
#include <optional>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::parallel {

struct OffloadGroups {
  const wrap::LocatedGroup& all;
  const wrap::LocatedGroup& shard;  // the group whose ranks own the shards
};

// Reserves disk space for the shards of this rank, their gradients and the optimizer's state.
// Returns null, and is not collective, without an offload.
std::shared_ptr<FileMemory> open_offload(const std::optional<FileOffload>& offload,
                                         const UnitAssignment& assignment,
                                         const OffloadGroups& groups);

}  // namespace cadre::parallel
