// The record of the snapshot from which a run continues that is not one of its own: until the run
// has written a later snapshot, run.resume=auto continues from that one again.
//
// Threads: rank 0 writes; any rank reads. Blocking: reads and writes a disk. Lifetime: plain
// values. Errors: kCorruption for a damaged record; kInvalidArgument if the snapshot is no longer
// there; kUnavailable with the path. Format: docs/formats/snapshot.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/train/checkpoint/snapshot_folder.h"

namespace cadre::train {

struct RunOrigin {
  int64_t step = 0;
  // Snapshots of the run that are still to be set aside, because they belong to another branch.
  std::vector<int64_t> abandoned;
  std::string snapshot;  // relative to the folder of the run if it is below

  friend bool operator==(const RunOrigin&, const RunOrigin&) = default;

  static std::string path_of(const std::string& run_folder);
  // nullopt if the run has none.
  static std::optional<RunOrigin> read(const std::string& run_folder);
  void write(const std::string& run_folder) const;
};

// The snapshot of the record, if the run has written no later one. It may be missing.
std::optional<std::string> followed_origin(const SnapshotFolder& snapshots);
// That, or the latest snapshot of the run. Throws if the former is missing.
std::optional<std::string> followed_or_latest(const SnapshotFolder& snapshots);

}  // namespace cadre::train
