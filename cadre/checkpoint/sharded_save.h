// Saves a snapshot of which each rank of a group writes its part.
//
// Threads: one at a time for a folder and a group. Blocking: for the time of the disk, and in a
// group until the slowest rank is done; each wait of the ranks for each other ends after `timeout`.
// Lifetime: borrows what it is given until the call returns. Every rank reaches the run folder,
// under a path of its own. Format: docs/formats/sharded-snapshot.md; use: docs/guide/snapshots.md.
// Errors: cadre::Error, equal on all ranks, with the rank at fault and the system's reason; a run
// that should survive a failed snapshot catches it. After an error the earlier snapshots are as
// they were; where only the last agreement failed (a rank was lost), or `latest` could not be
// written, the new one is there, whole. Source: torch.distributed.checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/checkpoint/snapshot_parts.h"
#include "cadre/comm/defaults.h"
#include "cadre/group/process_group.h"

namespace cadre {

class RankAgreement;

struct SaveOptions {
  // For people who read the manifest: "fsdp", "{replicate: 2, shard: 4}".
  std::string strategy = {};
  std::string mesh = {};
  Duration timeout = kDefaultSnapshotTimeout;
};

// Collective. The parts of all ranks together must be whole tensors; what several ranks hold is
// written once.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const ProcessGroup& group, const SaveOptions& options = {});
// Of one process on its own.
CADRE_EXPORT void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                               const SaveOptions& options = {});
// The two above are this one, whose ranks may be those of a group made before.
void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                  const RankAgreement& ranks, const SaveOptions& options);

}  // namespace cadre
