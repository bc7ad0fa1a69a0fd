// Loads a sharded snapshot on any number of ranks, under any strategy.
//
// Threads: one at a time for a group. Blocking: reads a disk. In a group it returns when the
// slowest rank has checked and read its files; each wait for other ranks ends after `timeout`.
// Lifetime: borrows its arguments until the call returns. Format: docs/formats/sharded-snapshot.md;
// use: docs/guide/training/snapshots.md. Source: torch.distributed.checkpoint.
//
// Errors: equal on all ranks and thrown before any value is changed: kCorruption with the damaged
// file, or kInvalidArgument with the first tensor that is missing, unexpected, or of another shape
// or dtype. If a file changes while it is read, the error is kInvalidArgument with its path, also
// equal on all ranks, but the values are then undefined.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre {

struct LoadOptions {
  bool with_optimizer = true;
  // If true, each file is compared with its digest before anything is loaded. Ranks of one machine
  // that see the same files (by device and inode) divide this work. A rank that sees other files,
  // for example on another machine, compares all files that it reads. A safetensors file has no
  // digest: ranks that see different files under its path compare a hash of its content with each
  // other. If false, each rank reads only what it loads.
  bool with_digests = true;
  Duration timeout = kDefaultSnapshotTimeout;
};

struct LoadedSnapshot {
  int64_t step = 0;
  // The optimizer's states of all parameters that have one in the snapshot. Each entry of a
  // parameter has its own state, with tensors of the shape of its `values` on this rank.
  std::vector<ParameterState> optimizer;
  std::string extra = "{}";
  std::string strategy;  // the strategy of the run that saved the snapshot
};

// Collective. Fills the `values` of the parameters and buffers of `parts`. Besides them only the
// field `flat` is used: it tells the wrapper or optimizer that owns the values to gather its whole
// parameters again, at once or in its next forward. `path` is the folder of a snapshot, or a
// safetensors file of whole tensors, which has no optimizer state.
CADRE_EXPORT LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                                         const ProcessGroup& group,
                                         const LoadOptions& options = {});
// Loads in a single process without a group.
CADRE_EXPORT LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                                         const LoadOptions& options = {});

}  // namespace cadre
