#include "cadre/os/io/fd.h"

#include <fcntl.h>

#include <cerrno>

namespace cadre::os {

int move_from_standard_streams(int number) {
  const int moved = ::fcntl(number, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error_number = errno;
  ::close(number);
  errno = error_number;
  return moved;
}

}  // namespace cadre::os
