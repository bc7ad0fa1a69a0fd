// The folder of a run: locks it so that only one process writes, finds the snapshot from which the
// run resumes, renames an earlier run with the same name, and moves what a run abandons that goes
// back to an earlier step.
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

// Returns the folder of the snapshot to resume from; nullopt to start at step 0. If a run has
// continued from a snapshot that is not its own, it continues from it again until it has written
// one. REQUIRES: this job has locked the folder of the run (RunFolder), so that no other run writes
// a later snapshot meanwhile.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

// Returns whether the last process that wrote to the folder belonged to this job
// (RunFolder::record_job()), so that a restart of the job continues from the folder's snapshots.
bool is_run_of_job(const std::string& run_path, const std::string& job);

std::string metrics_path_of(const std::string& run_path);

// The snapshot from which a run continues.
struct BranchPoint {
  std::string snapshot;
  int64_t step = 0;
  std::optional<double> best_loss = {};  // the best held-out loss up to this step
  bool has_steps_left = true;            // if false, the run changes nothing
};

// Only one process at a time writes to a run's folder; two would mix their snapshots.
class RunFolder {
 public:
  // Creates the folder and locks it for the lifetime of this object. The destructor removes a
  // folder that was created and is still empty.
  explicit RunFolder(const std::string& path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  struct Moved {
    std::string earlier_run;  // the new name of the earlier run; empty if there was none
    // The folder with the snapshots of later steps and a copy of the metrics; nullopt if there were
    // none.
    std::optional<std::string> abandoned;
  };
  // Prepares the folder for the steps after `start`, or for all steps if `start` is nullopt.
  // - If `start` is a snapshot of this run: moves snapshots of later steps to a folder of the run;
  // no later start continues from them. If the best snapshot is among them, marks the best one of
  // the rest.
  // - If it is another snapshot below the folder: does the same, and records the snapshot as the
  // origin, from which run.resume=auto continues until the run has a snapshot of a later step.
  // - Otherwise: renames the folder of an earlier run (folder.1, folder.2, ...; nothing is
  // deleted), and records the snapshot, if there is one, in the new folder.
  Moved begin(const std::optional<BranchPoint>& start);

  // Records which job writes to the folder. Call it after begin(), if the launcher may start the
  // job's processes again.
  void record_job(const std::string& job);
  // Removes the record of an earlier job. Call it before begin(), unless this process was started
  // again.
  void forget_job();

 private:
  void lock();

  std::string path_;
  // The created folders, of which the deepest comes first.
  std::vector<std::filesystem::path> created_;
  std::optional<os::LockedFile> lock_;
};

}  // namespace cadre::train
