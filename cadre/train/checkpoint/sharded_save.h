// Saves a sharded snapshot: each rank of a group writes its shard.
//
// Threads: one at a time for a folder and a group. Blocking: writes a disk, and in a group waits
// for the slowest rank; each wait for other ranks ends after `timeout`. Lifetime: borrows its
// arguments until the call returns. Every rank must have access to the run folder; the path may
// differ between ranks. Format: docs/formats/sharded-snapshot.md; use:
// docs/guide/training/snapshots.md.
// Errors: cadre::Error, equal on all ranks, with the rank at fault and the system's reason; a run
// that continues after a failed snapshot catches it. After an error the earlier snapshots are
// unchanged. If only the last exchange failed (a rank was lost), or `latest` could not be written,
// the new snapshot is complete, too. Source: torch.distributed.checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre {

struct SaveOptions {
  // Written to the manifest for information, such as "fsdp" and "{replicate: 2, shard: 4}".
  std::string strategy = {};
  std::string mesh = {};
  Duration timeout = kDefaultSnapshotTimeout;
};

// Collective; all ranks pass the same step. The parts of all ranks together must be whole tensors,
// and all ranks have the same names of parameters and buffers, because a load requires that.
// Elements that several ranks hold are written once, also if the boxes of these ranks begin and end
// at different places.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const ProcessGroup& group, const SaveOptions& options = {});
// Without a group, saves in a single process.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const SaveOptions& options = {});
// Collective. Writes nothing. Throws the error that save_sharded() would throw for parts that no
// snapshot can hold, with "snapshot" instead of the step. Call it before a training, so that such
// parts are found before they have cost time.
CADRE_EXPORT void check_savable(const SnapshotParts& parts, const ProcessGroup& group,
                                const SaveOptions& options = {});

}  // namespace cadre
