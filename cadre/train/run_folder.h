// The folder of a run: where it begins, who may write there, and what happens to an earlier run of
// the same name.
//
// Threads: rank 0 only, but find_snapshot. Blocking: for the time of the disk. Errors: kUnavailable
// with the path; kInvalidArgument for a snapshot that is not there, or a folder that is taken.
#pragma once

#include <optional>
#include <string>

#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/os/files/locked_file.h"
#include "cadre/train/config/config.h"

namespace cadre::train {

// The folder of the snapshot to go on from; nullopt to start anew.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

// Writing to a run's folder is one process' right at a time: two would mix their snapshots.
class RunFolder {
 public:
  // Makes the folder and takes it until this object ends. What an earlier run left there is moved
  // aside (folder.1, folder.2, ...: nothing is ever deleted), unless `snapshot`, the one to go on
  // from, lies in it.
  RunFolder(const std::string& path, const std::optional<std::string>& snapshot);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // Where an earlier run was moved to, or nothing.
  const std::string& moved_to() const { return moved_to_; }

 private:
  std::string moved_to_;
  os::LockedFile lock_;
};

}  // namespace cadre::train
