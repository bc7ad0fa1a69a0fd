// The snapshots of a run, as folders that are complete or do not exist.
//
// runs/NAME/step-000100/ holds the files of one snapshot, runs/NAME/latest its folder's name. A
// snapshot is written into a temporary folder, then renamed into place, and only then named by
// `latest` (and `best`). So every earlier snapshot stays usable after a crash at any time, and if
// the disk is full. After a crash between the two renames, latest() returns the new snapshot, which
// is complete.
// Threads: one writer; if two save the same step at once, one of the saves fails. Blocking: reads
// and writes a disk. Errors: cadre::Error, kUnavailable with the path, and what `write_files`
// throws. Layout: docs/formats/snapshot.md.
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
  // A move is a copy, so that an object that was moved from is usable.
  SnapshotFolder(const SnapshotFolder&) = default;
  SnapshotFolder& operator=(const SnapshotFolder&) = default;

  const std::string& run_folder() const { return run_folder_; }

  // Calls `write_files` with an empty folder, which it must fill with synced files. Then publishes
  // the folder as the snapshot of this step, in place of an earlier one of the same step. After an
  // error nothing of the snapshot remains, unless the last operations failed: the rename to
  // `latest` and the syncs of the run folder. Then the snapshot is complete.
  void save(int64_t step, const std::function<void(const std::string& folder)>& write_files);

  // Returns the folder of the snapshot that was saved last. It is complete at any time, also after
  // a crash. If `latest` is missing or names a removed snapshot, returns the snapshot of the
  // highest step; nullopt if there is no snapshot.
  std::optional<std::string> latest() const;
  std::optional<int64_t> latest_step() const;
  // Writes the name of this step's snapshot to runs/NAME/best. REQUIRES: it was saved.
  void mark_best(int64_t step);
  // Returns the folder of the snapshot that was marked as the best; nullopt if none was marked.
  std::optional<std::string> best() const;
  std::string path_of(int64_t step) const;
  // Called by a run that continues from an earlier step than its last one, by one process of the
  // job. Names this step's snapshot in `latest`, then moves all snapshots of later steps to a new
  // folder runs/NAME/abandoned.N and returns that folder; nullopt if there are no later ones. After
  // a crash at any time each of them is complete, and latest() returns the snapshot of this step.
  // REQUIRES: it was saved.
  std::optional<std::string> set_aside_after(int64_t step);
  // Returns the step in the name of a snapshot's folder; nullopt for another name.
  static std::optional<int64_t> step_of_folder(const std::string& path);
  // Removes all snapshots except the `count` of the highest steps and those that `latest` and
  // `best` name. After a crash each snapshot is complete or removed. Called by one process of a
  // job.
  void keep_last(size_t count);
  // Returns the steps of all snapshots, in ascending order.
  std::vector<int64_t> steps() const;

 private:
  // See on_file_system.h.
  friend SnapshotFolder snapshot_folder_on(os::FileSystem& files, std::string run_folder);
  friend os::FileSystem& files_of(const SnapshotFolder& folder);

  SnapshotFolder(std::string run_folder, std::shared_ptr<os::FileSystem> files);

  void write_and_publish(int64_t step, const std::function<void(const std::string&)>& write_files);

  void finish_publishing();
  void write_pointer(std::string_view pointer, int64_t step);
  bool is_folder(const std::string& path) const;
  std::optional<std::string> folder_named_by(std::string_view pointer) const;

  std::string run_folder_;
  std::shared_ptr<os::FileSystem> files_;  // copies share it; it is owned unless a test gave it
};

}  // namespace cadre
