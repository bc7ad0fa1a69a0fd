// The space of the file system in which a folder is.
//
// Threads: any. Blocking: for the time of the file system; a network file system whose server is
// gone may block indefinitely. Errors: kUnavailable with the path and the system's reason;
// kInvalidArgument for a path that is no folder.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/error.h"

namespace cadre::os {

struct FolderSpace {
  uint64_t free_bytes = 0;  // that this user may use
  uint64_t total_bytes = 0;
  uint64_t free_files = 0;   // 0 if the file system has no fixed number of files, as btrfs
  uint64_t total_files = 0;  // 0 likewise
  std::string file_system;   // "ext4", "nfs", or the kernel's number in hexadecimal
  bool is_shared = false;    // a file system that several hosts may share
  bool is_writable = false;  // this process may make files in the folder
};

Result<FolderSpace> read_folder_space(const std::string& path);

}  // namespace cadre::os
