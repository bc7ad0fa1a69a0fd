// Opening of regular files to read, and which file a path or a descriptor leads to.
//
// Threads: any. Blocking: for the time of the disk. Lifetime: plain values, and the descriptor that
// open_regular_file() returns. Errors: kUnavailable with the path and the system's reason;
// kInvalidArgument for a pipe, a socket or a device.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/io/fd.h"

struct stat;

namespace cadre::os {

// Equal values of two processes on one machine mean one file, also in different mount namespaces.
// On different machines they mean nothing.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

FileIdentity identity_of(const struct stat& status);
// The file to which symbolic links lead.
CADRE_EXPORT Result<FileIdentity> file_identity(const std::string& path);

// Sets `status` to that of the open file.
Result<Fd> open_regular_file(const std::string& path, struct stat& status);

}  // namespace cadre::os
