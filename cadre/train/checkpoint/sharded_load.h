// Loads a sharded snapshot on any number of ranks, under any strategy.
//
// Threads: one at a time for a group. Blocking: reads a disk; in a group, returns when the slowest
// rank has checked its share of the files and has read, and waits for other ranks at most for
// `timeout`. Lifetime: borrows its arguments until the call returns. Format:
// docs/formats/sharded-snapshot.md; use: docs/guide/training/snapshots.md.
// Errors: throws kCorruption with the damaged file, or kInvalidArgument with the first tensor that
// is missing, unexpected, or of another shape or dtype; the same error on all ranks, and before any
// value is changed. If a file changes while it is read, the error is kInvalidArgument with its
// path, the same on all ranks, and the values are undefined. Source: torch.distributed.checkpoint.
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
  // Compares each file with its digest before anything is loaded. Ranks of one machine that see the
  // same files, by device and inode, divide them. A rank that sees other files, for example on
  // another machine, compares all files that it reads. A safetensors file has no digest; ranks that
  // see different files compare its content with each other. With false, each rank reads only what
  // it loads.
  bool with_digests = true;
  Duration timeout = kDefaultSnapshotTimeout;
};

struct LoadedSnapshot {
  int64_t step = 0;
  // The states of the parameters that have one in the snapshot. There is one entry for each entry
  // of a parameter, with tensors of the shape of its `values` on this rank.
  std::vector<ParameterState> optimizer;
  std::string extra = "{}";
  std::string strategy;  // the strategy of the run that has saved it
};

// Collective. Fills the `values` of the parameters and buffers of `parts`. Of its other fields only
// `flat` is used: the wrapper or optimizer that holds these values gathers its whole parameters
// again, at once or in its next forward. `path` is the folder of a snapshot, or a safetensors file
// of whole tensors, which has no optimizer state.
CADRE_EXPORT LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                                         const ProcessGroup& group,
                                         const LoadOptions& options = {});
// Without a group, loads in a single process.
CADRE_EXPORT LoadedSnapshot load_sharded(const std::string& path, const SnapshotParts& parts,
                                         const LoadOptions& options = {});

}  // namespace cadre
