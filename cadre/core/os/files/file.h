// Whole files: read with a bound, and replaced in one step. How they are replaced: durable_file.h.
//
// Threads: any. Blocking: for the time of the disk.
// Errors: kUnavailable with the path and the system's reason; kInvalidArgument for a file over the
// bound, and for a pipe, a socket or a device, of which nobody knows when it ends.
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

// The whole file; kInvalidArgument if it has more than `max_bytes`. Works for /proc too, whose
// files say they have 0 bytes.
CADRE_EXPORT Result<std::string> read_file(const std::string& path, size_t max_bytes);

// Writes a temporary file beside `path`, syncs it, renames it over `path` and syncs the folder: a
// reader sees the old content or the new, even after a power cut.
CADRE_EXPORT Status replace_file(const std::string& path, ConstBytes content);

}  // namespace cadre::os
