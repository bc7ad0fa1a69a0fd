#include "cadre/core/os/proc/pipe.h"

#include <fcntl.h>

#include <cerrno>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

PipeReader::Chunk PipeReader::try_read(Bytes buffer) {
  while (true) {
    const ssize_t got = ::read(fd_.get(), buffer.data(), buffer.size());
    if (got > 0) return {.num_bytes = static_cast<size_t>(got)};
    if (got == 0) return {.has_ended = true};
    if (errno == EINTR) continue;
    // A pipe delivers no more bytes after an error other than EAGAIN.
    return {.has_ended = errno != EAGAIN};
  }
}

Result<Pipe> make_pipe() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return errno_error(ErrorCode::kUnavailable, "make a pipe", errno);
  }
  Pipe pipe{.read_end = Fd(ends[0]), .write_end = Fd(ends[1])};
  if (!pipe.read_end.is_open() || !pipe.write_end.is_open()) {
    return errno_error(ErrorCode::kUnavailable, "make a pipe", errno);
  }
  if (::fcntl(pipe.read_end.get(), F_SETFL, O_NONBLOCK) != 0) {
    return errno_error(ErrorCode::kUnavailable, "make a pipe non-blocking", errno);
  }
  return pipe;
}

}  // namespace cadre::os
