// The folder of a run: the lock that lets one process write, which snapshot the run resumes from,
// renaming of an earlier run with the same name, and moving of what a run that goes back abandons.
//
// Threads: rank 0 only, except find_snapshot(). Blocking: reads and writes a disk. Errors:
// kUnavailable with the path; kInvalidArgument for a missing snapshot, or a folder that another
// process has locked; kCorruption for a damaged record of the origin.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// The folder of the snapshot to resume from; nullopt to start at step 0. A run that continues from
// a snapshot that is not one of its own continues from it again until it has written one.
// REQUIRES: this job has locked the folder of the run (RunFolder), so that no other run writes a
// later snapshot meanwhile.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

std::string metrics_path_of(const std::string& run_path);

// The snapshot from which a run continues.
struct BranchPoint {
  std::string snapshot;
  int64_t step = 0;
  std::optional<double> best_loss = {};  // until then
  bool has_steps_left = true;            // if not, the run changes nothing
};

// Only one process at a time writes to a run's folder; two would mix their snapshots.
class RunFolder {
 public:
  // Creates the folder and locks it for the lifetime of this object. A folder that was created and
  // is still empty at the end is removed.
  explicit RunFolder(const std::string& path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  struct Moved {
    std::string earlier_run;  // its new name; empty if there was none
    // Where the snapshots of later steps and a copy of the metrics are; nullopt if there were none.
    std::optional<std::string> abandoned;
  };
  // Prepares the folder for the steps after `start`, nullopt: for those from step 1 on.
  // - From a snapshot of its own: snapshots of later steps are moved to a folder of the run, and no
  //   later start continues from them. If the best snapshot is among them, the best one before
  //   takes its place.
  // - From another snapshot below the folder: likewise, and the snapshot is recorded as the origin,
  //   from which run.resume=auto continues until the run has a snapshot of a later step.
  // - Otherwise the folder of an earlier run is renamed (folder.1, folder.2, ...; nothing is
  //   deleted), and the snapshot, if there is one, recorded in the new one.
  Moved begin(const std::optional<BranchPoint>& start);

 private:
  void lock();

  std::string path_;
  std::vector<std::filesystem::path> created_;  // the deepest first
  std::optional<os::LockedFile> lock_;
};

}  // namespace cadre::train
