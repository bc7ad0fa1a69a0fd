// Snapshot folders and the functions that write whole files, on a given file system. With a
// simulated disk a test interrupts them at any operation.
//
// Threads, blocking, lifetime, errors: as snapshot_folder.h, module_file.h and full_state.h.
#pragma once

#include <string>

#include "cadre/core/os/file_system.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/snapshot_folder.h"

namespace cadre {

// files: outlives the folder and its copies.
SnapshotFolder snapshot_folder_on(os::FileSystem& files, std::string run_folder);
os::FileSystem& files_of(const SnapshotFolder& folder);

void save(const torch::nn::Module& module, os::FileSystem& files, const std::string& path);
// snapshot: a folder of the operating system's file system.
void write_full_state(const std::string& snapshot, os::FileSystem& files, const std::string& path,
                      SnapshotContent content);

}  // namespace cadre
