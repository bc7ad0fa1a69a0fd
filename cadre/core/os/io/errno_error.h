// Turns errno into an Error that names the attempted action and the system's reason.
//
// Threads: any. Blocking: never.
#pragma once

#include <string_view>

#include "cadre/core/base/error.h"

namespace cadre::os {

// Returns an error such as "connect to tcp:127.0.0.1:1: Connection refused (errno 111)".
Error errno_error(ErrorCode code, std::string_view what, int error_number);

}  // namespace cadre::os
