// The record, in the folder of a run, of the snapshot from which the run was started, if that is
// not one of its own. Until the run has written a later snapshot, run.resume=auto resumes from the
// recorded one again.
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
  // The steps of those of the run's snapshots that belong to an abandoned branch and still have to
  // be moved to another folder.
  std::vector<int64_t> abandoned;
  // The snapshot's path; relative to the run's folder if the snapshot is inside it.
  std::string snapshot;

  friend bool operator==(const RunOrigin&, const RunOrigin&) = default;

  static std::string path_of(const std::string& run_folder);
  // Returns nullopt if the folder has no record.
  static std::optional<RunOrigin> read(const std::string& run_folder);
  void write(const std::string& run_folder) const;
};

// Returns the recorded snapshot, unless the run has written a later one. Its folder need not exist.
std::optional<std::string> followed_origin(const SnapshotFolder& snapshots);
// Returns followed_origin() or, if that is nullopt, the latest snapshot of the run. Throws if the
// recorded snapshot does not exist.
std::optional<std::string> followed_or_latest(const SnapshotFolder& snapshots);

}  // namespace cadre::train
