// The snapshots of a run, each in a folder that is complete or does not exist.
//
// runs/NAME/step-000100/ holds the files of one snapshot; the file runs/NAME/latest holds the name
// of its folder. A save writes into a temporary folder, renames it into place, and only then writes
// its name to `latest` (mark_best() to `best`). So every earlier snapshot stays usable after a
// crash at any time, and if the disk is full. After a crash between the rename and the write of
// `latest`, latest() already returns the new snapshot, which is complete.
//
// Threads: one writer; if two save the same step at once, one of the saves fails. Blocking: reads
// and writes a disk. Errors: cadre::Error, kUnavailable with the path, and any exception of
// `write_files`. Layout: docs/formats/snapshot.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {
class FileSystem;
}

namespace cadre {

class CADRE_EXPORT SnapshotFolder {
 public:
  explicit SnapshotFolder(std::string run_folder);
  // Moves are copies, so that an object that was moved from stays usable.
  SnapshotFolder(const SnapshotFolder&) = default;
  SnapshotFolder& operator=(const SnapshotFolder&) = default;

  const std::string& run_folder() const { return run_folder_; }

  // Calls `write_files` with an empty folder, which it must fill with synced files. Then publishes
  // the folder as the snapshot of this step; an earlier one of the same step is replaced. If the
  // save throws, no part of the new snapshot remains, with one exception: if only the last
  // operations failed (the rename to `latest`, the syncs of the run folder), the snapshot is
  // complete.
  void save(int64_t step, const std::function<void(const std::string& folder)>& write_files);

  // Returns the folder of the snapshot that was saved last, which is complete even after a crash.
  // If `latest` is missing or names a removed snapshot, returns the snapshot of the highest step;
  // nullopt if there is no snapshot.
  std::optional<std::string> latest() const;
  std::optional<int64_t> latest_step() const;
  // Writes the name of this step's snapshot to runs/NAME/best. REQUIRES: the step was saved.
  void mark_best(int64_t step);
  // Returns the folder that mark_best() has named; nullopt if there is none.
  std::optional<std::string> best() const;
  std::string path_of(int64_t step) const;
  // Writes the name of this step's snapshot to `latest`. Then moves the snapshots of all later
  // steps to a new folder runs/NAME/abandoned.N and returns that folder; returns nullopt if there
  // are no later ones. Call it in one process of the job, if a run continues from an earlier step
  // than its last one. After a crash at any time each snapshot is complete, and latest() returns
  // the snapshot of this step. REQUIRES: the step was saved.
  std::optional<std::string> set_aside_after(int64_t step);
  // Returns the step that the name of a snapshot's folder contains; nullopt for any other name.
  static std::optional<int64_t> step_of_folder(const std::string& path);
  // Removes all snapshots except those of the `count` highest steps and those that `latest` and
  // `best` name. After a crash each snapshot is either complete or removed. Call it in one process
  // of the job.
  void keep_last(size_t count);
  // Returns the steps of all snapshots, in ascending order.
  std::vector<int64_t> steps() const;

 private:
  // Constructs an object with a file system that a test passes; see on_file_system.h.
  friend SnapshotFolder snapshot_folder_on(os::FileSystem& files, std::string run_folder);
  friend os::FileSystem& files_of(const SnapshotFolder& folder);

  SnapshotFolder(std::string run_folder, std::shared_ptr<os::FileSystem> files);

  void write_and_publish(int64_t step, const std::function<void(const std::string&)>& write_files);

  void finish_publishing();
  void write_pointer(std::string_view pointer, int64_t step);
  bool is_folder(const std::string& path) const;
  std::optional<std::string> folder_named_by(std::string_view pointer) const;

  std::string run_folder_;
  // Copies of this SnapshotFolder share it. A file system that a test passed is not deleted.
  std::shared_ptr<os::FileSystem> files_;
};

}  // namespace cadre
