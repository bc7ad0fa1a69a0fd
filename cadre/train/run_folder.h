// The folder of a run: which snapshot the run resumes from, the lock that lets one process write,
// renaming of an earlier run with the same name, and moving of what a run that goes back abandons.
//
// Threads: rank 0 only, except find_snapshot(). Blocking: reads and writes a disk. Errors:
// kUnavailable with the path; kInvalidArgument for a missing snapshot, or a folder that another
// process has locked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/os/files/locked_file.h"
#include "cadre/train/config/config.h"

namespace cadre::train {

// The folder of the snapshot to resume from; nullopt to start at step 0.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

std::string metrics_path_of(const std::string& run_path);

// The snapshot from which a run continues.
struct BranchPoint {
  int64_t step = 0;
  std::optional<double> best_loss = {};  // until then
};
// Moves snapshots of later steps, and a copy of the metrics, to a folder of the run, which is
// returned, so that no later start continues from them; nullopt if there are none. If the best
// snapshot is among them, the best one before takes its place.
std::optional<std::string> set_abandoned_aside(SnapshotFolder& snapshots,
                                               const BranchPoint& branch);

// Only one process at a time writes to a run's folder; two would mix their snapshots.
class RunFolder {
 public:
  // Creates the folder and locks it for the lifetime of this object. A folder of an earlier run is
  // renamed first (folder.1, folder.2, ...; nothing is deleted), unless `snapshot`, from which the
  // run resumes, is in it.
  RunFolder(const std::string& path, const std::optional<std::string>& snapshot);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // The new name of the folder of an earlier run; empty if there was none.
  const std::string& moved_to() const { return moved_to_; }

 private:
  std::string moved_to_;
  os::LockedFile lock_;
};

}  // namespace cadre::train
