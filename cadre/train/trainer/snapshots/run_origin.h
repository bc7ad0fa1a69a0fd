// Stores, in the folder of a run, the snapshot from which the run continues if that snapshot is
// none of the run's own. Until the run has written a later snapshot, run.resume=auto continues from
// the stored one again.
//
// Threads: rank 0 writes; any rank reads. Blocking: reads and writes a disk. Lifetime: plain
// values. Errors: kCorruption for a damaged record; kInvalidArgument if the snapshot no longer
// exists; kUnavailable with the path. Format: docs/formats/snapshot.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/train/checkpoint/snapshot_folder.h"

namespace cadre::train {

struct RunOrigin {
  int64_t step = 0;
  // Steps of snapshots of the run that must still be set aside, because they belong to another
  // branch.
  std::vector<int64_t> abandoned;
  // The path, relative to the folder of the run if the snapshot is below that.
  std::string snapshot;

  friend bool operator==(const RunOrigin&, const RunOrigin&) = default;

  static std::string path_of(const std::string& run_folder);
  // Returns nullopt if the run has no record.
  static std::optional<RunOrigin> read(const std::string& run_folder);
  void write(const std::string& run_folder) const;
};

// Returns the recorded snapshot if the run has written no later one. That snapshot may be missing.
std::optional<std::string> followed_origin(const SnapshotFolder& snapshots);
// Returns followed_origin(), else the latest snapshot of the run. Throws if followed_origin() names
// a snapshot that does not exist.
std::optional<std::string> followed_or_latest(const SnapshotFolder& snapshots);

}  // namespace cadre::train
