// Snapshots of a run as folders that are there completely or not at all.
//
// runs/NAME/step-000100/ holds the files of one snapshot, runs/NAME/latest its folder's name. A
// snapshot is written into a temporary folder, renamed into place last, and only then named by
// `latest` (and `best`); so a crash at any moment, or a full disk, leaves every earlier one usable.
// Threads: one writer. Blocking: for the time of the disk. Errors: cadre::Error, kUnavailable with
// the path, and what `write_files` throws.
// Layout: docs/formats/snapshot.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/export.h"

namespace cadre {

class CADRE_EXPORT SnapshotFolder {
 public:
  explicit SnapshotFolder(std::string run_folder);

  const std::string& run_folder() const { return run_folder_; }

  // Calls `write_files` with an empty folder to fill (with synced files), then publishes it as this
  // step's snapshot, in place of an earlier one of the same step. After an error nothing of it is
  // left, but for the case that only `latest` could not be written: then it is there, whole.
  void save(int64_t step, const std::function<void(const std::string& folder)>& write_files);

  // The folder of the snapshot that was saved last, and its step; where `latest` is missing or
  // names none, because somebody removed it, the one of the highest step. nullopt when there is
  // none.
  std::optional<std::string> latest() const;
  std::optional<int64_t> latest_step() const;
  // Names this step's snapshot in runs/NAME/best. REQUIRES: it was saved.
  void mark_best(int64_t step);
  // The folder of the snapshot that was marked last; nullopt when none was.
  std::optional<std::string> best() const;
  std::string path_of(int64_t step) const;
  // What the name of a snapshot's folder says; nullopt for another name.
  static std::optional<int64_t> step_of_folder(const std::string& path);
  // Removes all snapshots but the `count` of the highest steps, and those that `latest` and `best`
  // name. A crash leaves each of the others whole or gone. One process of a job calls it.
  void keep_last(size_t count);
  // Of all snapshots that are there, in rising order.
  std::vector<int64_t> steps() const;

 private:
  void write_and_publish(int64_t step, const std::function<void(const std::string&)>& write_files);

  std::optional<std::string> folder_named_by(const std::string& pointer) const;

  std::string run_folder_;
};

}  // namespace cadre
