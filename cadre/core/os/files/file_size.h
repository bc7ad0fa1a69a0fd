// The limit on the size of the files that this process may make (RLIMIT_FSIZE, ulimit -f).
//
// The kernel ends a process that grows a file beyond the limit by SIGXFSZ, also the file of a
// shared segment, and a library does not change what a program does on signals. Therefore whatever
// grows a file compares with the limit first.
//
// Threads: any. Blocking: never. Errors: kUnavailable, with the limit and the remedy.
#pragma once

#include <cstdint>
#include <string_view>

#include "cadre/core/base/error.h"

namespace cadre::os {

// UINT64_MAX without a limit.
uint64_t largest_file_bytes();

// An error unless a file may have `num_bytes`. `what` begins the message: "write /a/b".
Status check_file_size(std::string_view what, uint64_t num_bytes);

}  // namespace cadre::os
