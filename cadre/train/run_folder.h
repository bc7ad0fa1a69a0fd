// The folder of a run: where it begins, and what happens to an earlier run of the same name.
//
// Threads: rank 0 only, but find_snapshot. Blocking: for the time of the disk. Errors: kUnavailable
// with the path; kInvalidArgument for a snapshot that is not there.
#pragma once

#include <optional>
#include <string>

#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/train/config/config.h"

namespace cadre::train {

// The folder of the snapshot to go on from; nullopt to start anew.
std::optional<std::string> find_snapshot(const RunConfig& run, const SnapshotFolder& snapshots);

struct RunFolderOptions {
  bool keep = false;  // go on in it; otherwise a folder that is there is moved aside
};

// Makes the folder. Returns where an earlier run was moved to (folder.1, folder.2, ...: nothing is
// ever deleted), or nothing.
std::string prepare_run_folder(const std::string& folder, const RunFolderOptions& options);

}  // namespace cadre::train
