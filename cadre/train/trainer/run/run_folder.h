// The folder of a run: locks it so that only one process writes, finds the snapshot from which the
// run resumes, renames the folder of an earlier run with the same name, and moves later snapshots
// away when a run goes back to an earlier step.
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

// Returns the folder of the snapshot to resume from; nullopt to start at step 0. If a run was
// started from a snapshot that is not its own (its origin), it resumes from that one again until it
// has written a later one. REQUIRES: this job has locked the run's folder (RunFolder), so that no
// other run can write a later snapshot in between.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

// Returns whether the folder was last written by this job, as RunFolder::record_job() recorded. If
// so, a later attempt of the job continues from the folder's snapshots.
bool is_run_of_job(const std::string& run_path, const std::string& job);

std::string metrics_path_of(const std::string& run_path);

// The snapshot from which a run continues.
struct BranchPoint {
  std::string snapshot;
  int64_t step = 0;
  std::optional<double> best_loss = {};  // the best held-out loss up to this step
  bool has_steps_left = true;            // false: the run ends at once, and begin() changes nothing
};

// Locks the folder of a run: if two processes wrote to it, they would mix their snapshots.
class RunFolder {
 public:
  // Creates the folder and locks it for the lifetime of this object. If the folder was created here
  // and is still empty, the destructor removes it.
  explicit RunFolder(const std::string& path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  struct Moved {
    std::string earlier_run;  // the new name of the earlier run's folder; empty if there was none
    // The folder with the snapshots of later steps and a copy of the metrics; nullopt if there are
    // none.
    std::optional<std::string> abandoned;
  };
  // Prepares the folder for the steps after `start`, or for all steps if `start` is nullopt.
  // - If `start` is a snapshot of this run: moves the snapshots of later steps to a folder inside
  // the run's folder; no later start continues from them. If the best snapshot is among them, marks
  // the best of the remaining ones.
  // - If it is another snapshot inside the folder: does the same, and records that snapshot as the
  // origin. run.resume=auto continues from the origin until the run has a snapshot of a later step.
  // - Otherwise: renames the folder of an earlier run (to folder.1, folder.2, ...; no file is
  // deleted), and records the snapshot, if there is one, as the origin in the new folder.
  Moved begin(const std::optional<BranchPoint>& start);

  // Records which job writes to the folder. Call it after begin(), if the launcher may start the
  // job's processes again.
  void record_job(const std::string& job);
  // Removes the record of an earlier job. Call it before begin() in the first attempt of a job.
  void forget_job();

 private:
  void lock();

  std::string path_;
  // The folders that the constructor created, the deepest first.
  std::vector<std::filesystem::path> created_;
  std::optional<os::LockedFile> lock_;
};

}  // namespace cadre::train
