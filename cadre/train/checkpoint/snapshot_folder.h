// The snapshots of a run, as folders that are complete or do not exist.
//
// runs/NAME/step-000100/ holds the files of one snapshot, runs/NAME/latest its folder's name. A
// snapshot is written into a temporary folder, renamed into place last, and only then named by
// `latest` (and `best`); so every earlier snapshot stays usable after a crash at any time, or if
// the disk is full. After a crash between the two, latest() returns the new snapshot, which is
// complete. Threads: one writer; a second one that saves the same step makes one of the two fail.
// Blocking: reads and writes a disk. Errors: cadre::Error, kUnavailable with the path, and what
// `write_files` throws. Layout: docs/formats/snapshot.md.
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
  // files: outlives this object; null: that of the operating system.
  explicit SnapshotFolder(std::string run_folder, os::FileSystem* files = nullptr);
  // A move is a copy, so that an object that was moved from is usable.
  SnapshotFolder(const SnapshotFolder&) = default;
  SnapshotFolder& operator=(const SnapshotFolder&) = default;

  const std::string& run_folder() const { return run_folder_; }
  os::FileSystem& files() const { return *files_; }

  // Calls `write_files` with an empty folder to fill with synced files, then publishes the folder
  // as this step's snapshot, replacing an earlier one of the same step. After an error nothing of
  // it remains, except if the last operations failed, the rename to `latest` and the syncs of the
  // run folder: then the snapshot is complete.
  void save(int64_t step, const std::function<void(const std::string& folder)>& write_files);

  // The folder of the snapshot that was saved last, complete at any time, also after a crash. If
  // `latest` is missing or names a removed snapshot, the one of the highest step. nullopt if there
  // is none.
  std::optional<std::string> latest() const;
  std::optional<int64_t> latest_step() const;
  // Names this step's snapshot in runs/NAME/best. REQUIRES: it was saved.
  void mark_best(int64_t step);
  // The folder of the snapshot that was marked last; nullopt if none was.
  std::optional<std::string> best() const;
  std::string path_of(int64_t step) const;
  // For a run that continues from an earlier step than the last one: names this step's snapshot in
  // `latest` and then moves all snapshots of later steps to a new folder runs/NAME/abandoned.N,
  // which is returned; nullopt if there are none. A crash at any time leaves each of them complete,
  // and latest() returns this step's. REQUIRES: it was saved. Called by one process of a job.
  std::optional<std::string> set_aside_after(int64_t step);
  // The step in the name of a snapshot's folder; nullopt for another name.
  static std::optional<int64_t> step_of_folder(const std::string& path);
  // Removes all snapshots except the `count` of the highest steps and those that `latest` and
  // `best` name. After a crash each of the others is complete or removed. Called by one process of
  // a job.
  void keep_last(size_t count);
  // The steps of all snapshots, in ascending order.
  std::vector<int64_t> steps() const;

 private:
  void write_and_publish(int64_t step, const std::function<void(const std::string&)>& write_files);

  void finish_publishing();
  void write_pointer(std::string_view pointer, int64_t step);
  bool is_folder(const std::string& path) const;
  std::optional<std::string> folder_named_by(std::string_view pointer) const;

  std::string run_folder_;
  std::shared_ptr<os::FileSystem> files_;  // shared by copies; without an owner if it was given
};

}  // namespace cadre
