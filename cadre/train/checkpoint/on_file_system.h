// The functions that write snapshot folders and whole files, with the file system as an argument. A
// test passes a simulated disk, which fails at any chosen operation.
//
// Threads, blocking, lifetime, errors: as snapshot_folder.h, module_file.h and full_state.h.
#pragma once

#include <string>

#include "cadre/core/os/file_system.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/snapshot_folder.h"

namespace cadre {

// `files` must outlive the folder and its copies.
SnapshotFolder snapshot_folder_on(os::FileSystem& files, std::string run_folder);
os::FileSystem& files_of(const SnapshotFolder& folder);

void save(const torch::nn::Module& module, os::FileSystem& files, const std::string& path);
// `snapshot` is a folder of the operating system's file system; `path` is a file of `files`.
void write_full_state(const std::string& snapshot, os::FileSystem& files, const std::string& path,
                      SnapshotContent content);

}  // namespace cadre
