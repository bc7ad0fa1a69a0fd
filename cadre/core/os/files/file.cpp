#include "cadre/core/os/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

constexpr size_t kReadChunk = 64 << 10;

}  // namespace

Result<std::string> read_file(const std::string& path, size_t max_bytes) {
  // O_NONBLOCK is set because the path may be a FIFO, whose opening would wait for a writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info {};
  if (!fd.is_open() || ::fstat(fd.get(), &info) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("open {}", path), errno);
  }
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} is a pipe, a socket or a device; expected a file", path));
  }
  std::string content;
  for (;;) {
    const size_t have = content.size();
    // One byte more than the limit is read, which distinguishes a file that is too large from one
    // that just fits.
    const size_t room = std::min(kReadChunk, max_bytes - have) + 1;
    content.resize(have + room);
    const ssize_t received = ::read(fd.get(), content.data() + have, room);
    const int status = errno;
    content.resize(have + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && status == EINTR) continue;
    if (received < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("read {}", path), status);
    }
    if (received == 0) return content;
    if (content.size() > max_bytes) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{} has more than {} bytes, which is the limit for reading it",
                                 path, max_bytes));
    }
  }
}

}  // namespace cadre::os
