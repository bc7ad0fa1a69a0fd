#include "cadre/core/os/files/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

FileIdentity identity_of(const struct stat& status) {
  return {.device = status.st_dev, .inode = status.st_ino};
}

Result<FileIdentity> file_identity(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("look at {}", path), errno);
  }
  return identity_of(status);
}

Result<Fd> open_regular_file(const std::string& path, struct stat& status) {
  const std::string what = cadre::format("open {}", path);
  // O_NONBLOCK is set because the path may be a FIFO, whose opening would wait for a writer.
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.is_open() || ::fstat(fd.get(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, what, errno);
  }
  if (S_ISDIR(status.st_mode)) return errno_error(ErrorCode::kUnavailable, what, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} is a pipe, a socket or a device; expected a file", path));
  }
  return fd;
}

}  // namespace cadre::os
