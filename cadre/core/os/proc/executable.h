// Finds programs as a shell does, and says plainly why one cannot be run.
//
// Threads: any. Blocking: for the time of a look at the file system.
// Errors: kUnavailable for a program that is not there, kInvalidArgument for one that is there and
// cannot be executed.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/error.h"

namespace cadre::os {

// A name with a slash is a path; any other is looked up in `search_path` ("/bin:/usr/bin").
Result<std::string> find_executable(const std::string& name, std::string_view search_path);

// The file of the running program, symbolic links resolved.
Result<std::string> own_executable();

}  // namespace cadre::os
