// The limit on the size of the files that this process may make (RLIMIT_FSIZE, ulimit -f), and the
// reservation of their blocks.
//
// If a file, also that of a shared segment, grows beyond the limit, the kernel ends the process
// with SIGXFSZ, and a library must not change how the program handles signals. Therefore all code
// that lets a file grow checks the limit first.
//
// Threads: any. Blocking: never, except for disk access in reserve_blocks(). Errors: kUnavailable,
// with the limit and the remedy.
#pragma once

#include <cstdint>
#include <string_view>

#include "cadre/core/base/error.h"

namespace cadre::os {

// Returns the limit in bytes; UINT64_MAX if there is none.
uint64_t largest_file_bytes();

// Returns an error if a file of `num_bytes` would exceed the limit. `what` begins the message, for
// example "write /a/b".
Status check_file_size(std::string_view what, uint64_t num_bytes);

// Does the same as posix_fallocate(), but begins again after a signal, which ends that call with
// EINTR on tmpfs even if the handler has SA_RESTART. Returns 0 or the error number.
int reserve_blocks(int file, uint64_t begin, uint64_t num_bytes);

}  // namespace cadre::os
