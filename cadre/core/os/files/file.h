// Reads whole files up to a size limit, and replaces files atomically.
//
// Threads: any. Blocking: for the time of the disk. Errors: kUnavailable with the path and the
// system's reason; kInvalidArgument for a file over the limit, and for a pipe, a socket or a
// device, because they have no known end.
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

// Returns the whole file; kInvalidArgument if it has more than `max_bytes`. Works for /proc too,
// where the size of a file is given as 0.
CADRE_EXPORT Result<std::string> read_file(const std::string& path, size_t max_bytes);

// Writes a temporary file beside `path`, syncs it, renames it to `path` and syncs the folder: a
// reader sees the old or the new content, even after a power cut.
CADRE_EXPORT Status replace_file(const std::string& path, ConstBytes content);

}  // namespace cadre::os
