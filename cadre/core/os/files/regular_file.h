// Opens regular files for reading, and identifies the file to which a path or a descriptor leads.
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

// Equal values on one machine mean the same file, even if the processes that compare them are in
// different mount namespaces. Values of different machines cannot be compared.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

FileIdentity identity_of(const struct stat& status);
// Returns the identity of the file at `path`. Follows symbolic links.
CADRE_EXPORT Result<FileIdentity> file_identity(const std::string& path);

// Opens the file and sets `status` to the result of fstat().
Result<Fd> open_regular_file(const std::string& path, struct stat& status);

}  // namespace cadre::os
