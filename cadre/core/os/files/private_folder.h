// A folder for files that only their user may read.
//
// Threads: any. Blocking: for the time of the disk. Errors: kUnavailable with the path and the
// system's reason.
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

// Creates the folder and its missing parents. The folder itself is open to its user only (0700) if
// it is created here; an existing folder keeps its mode.
CADRE_EXPORT Status make_private_folder(const std::string& path);

}  // namespace cadre::os
