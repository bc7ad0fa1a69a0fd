// Opens the file of each rank for FileOffload. If this fails on one rank, all ranks throw.
//
// Blocking: open_offload() is a collective, until the group's deadline. Errors: kUnavailable on all
// ranks if the folder or the disk space is missing on one rank.
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

// Opens this rank's file and reserves disk space for its shards, their gradients and the optimizer
// state. If `offload` is nullopt, returns null without communication.
std::shared_ptr<FileMemory> open_offload(const std::optional<FileOffload>& offload,
                                         const UnitAssignment& assignment,
                                         const OffloadGroups& groups);

}  // namespace cadre::parallel
