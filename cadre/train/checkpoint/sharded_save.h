// Saves a sharded snapshot: each rank of a group writes its shard.
//
// Threads: one at a time for a folder and a group. Blocking: writes a disk, and in a group waits
// for the slowest rank; each wait for other ranks ends after `timeout`. Lifetime: borrows its
// arguments until the call returns. Every rank must have access to the run folder; the path may
// differ between ranks. Format: docs/formats/sharded-snapshot.md; use:
// docs/guide/training/snapshots.md. Source: torch.distributed.checkpoint.
//
// Errors: cadre::Error, equal on all ranks, with the rank that failed and the system's reason. A
// run that should continue after a failed save must catch it. Earlier snapshots are unchanged. In
// two cases the new snapshot is complete in spite of the error: if a rank was lost in the last
// exchange, or if `latest` could not be written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre {

struct SaveOptions {
  // The manifest contains these texts for information, such as "fsdp" and "{replicate: 2, shard:
  // 4}".
  std::string strategy = {};
  std::string mesh = {};
  Duration timeout = kDefaultSnapshotTimeout;
  // Groups beside that of the save whose collectives write the tensors, such as those along the
  // axes of a mesh. If one of their collectives has failed on a device, a save in the background of
  // what it has written fails, too (snapshot_saver.h).
  std::vector<ProcessGroup> groups = {};
};

// Collective; all ranks pass the same step. The parts of all ranks together must cover whole
// tensors, and all ranks must have the same names of parameters and buffers, because a load
// requires that. An element that several ranks hold is written once, even if the boxes of these
// ranks overlap only in part.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const ProcessGroup& group, const SaveOptions& options = {});
// Saves in a single process without a group.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const SaveOptions& options = {});
// Collective. Writes no file. Throws the error that save_sharded() would throw for parts that no
// snapshot can hold; its message begins with "snapshot" instead of "snapshot of step N". Call it
// before training starts, so that such an error does not come after hours.
CADRE_EXPORT void check_savable(const SnapshotParts& parts, const ProcessGroup& group,
                                const SaveOptions& options = {});

}  // namespace cadre
