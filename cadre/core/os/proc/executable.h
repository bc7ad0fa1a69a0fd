// Finds programs as a shell does, and says why one cannot be run.
//
// Threads: any. Blocking: for the time of the file system.
// Errors: kUnavailable for a program that does not exist, kInvalidArgument for one that cannot be
// executed.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/error.h"

namespace cadre::os {

// A name with a slash is a path. Other names are looked up in `search_path`, for example
// "/bin:/usr/bin".
Result<std::string> find_executable(const std::string& name, std::string_view search_path);

// Returns the file of the running program, with symbolic links resolved.
Result<std::string> own_executable();

}  // namespace cadre::os
