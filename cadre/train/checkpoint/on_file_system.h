// The functions that write whole files, on a given file system. With a simulated disk a test
// interrupts them at any operation.
//
// Threads, blocking, lifetime, errors: as module_file.h and full_state.h.
#pragma once

#include <string>

#include "cadre/core/os/file_system.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"

namespace cadre {

void save(const torch::nn::Module& module, os::FileSystem& files, const std::string& path);
// snapshot: a folder of the operating system's file system.
void write_full_state(const std::string& snapshot, os::FileSystem& files, const std::string& path,
                      SnapshotContent content);

}  // namespace cadre
