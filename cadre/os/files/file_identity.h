// Which file a path leads to.
//
// Threads: any. Blocking: for the time of the disk. Errors: kUnavailable with the path and the
// system's reason.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/base/error.h"
#include "cadre/base/export.h"

namespace cadre::os {

// Equal values of two processes on one machine mean one file, also in different mount namespaces.
// On different machines they mean nothing.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// Of the file to which symbolic links lead.
CADRE_EXPORT Result<FileIdentity> file_identity(const std::string& path);

}  // namespace cadre::os
