#include "cadre/core/os/files/file_size.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>
#include <limits>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

uint64_t largest_file_bytes() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<uint64_t>::max();
  }
  return limit.rlim_cur;
}

Status check_file_size(std::string_view what, uint64_t num_bytes) {
  const uint64_t largest = largest_file_bytes();
  if (num_bytes <= largest) return {};
  return errno_error(
      ErrorCode::kUnavailable,
      cadre::format(
          "{}: the file would have {} bytes, and this process may make files of at most {} bytes "
          "(ulimit -f, LimitFSIZE= of systemd); raise that limit",
          what, num_bytes, largest),
      EFBIG);
}

int reserve_blocks(int file, uint64_t begin, uint64_t num_bytes) {
  int status = EINTR;
  while (status == EINTR) {
    status = ::posix_fallocate(file, static_cast<off_t>(begin), static_cast<off_t>(num_bytes));
  }
  return status;
}

}  // namespace cadre::os
