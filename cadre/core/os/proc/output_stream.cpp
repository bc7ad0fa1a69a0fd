#include "cadre/core/os/proc/output_stream.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

OutputStream::OutputStream(Target target)
    : handle_(target == Target::kStandardOutput ? STDOUT_FILENO : STDERR_FILENO),
      is_terminal_(::isatty(handle_) == 1) {
  if (!is_terminal_) return;
  const std::string path = cadre::format("/proc/self/fd/{}", handle_);
  reopened_ = Fd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (reopened_.is_open()) handle_ = reopened_.get();
}

size_t OutputStream::try_write(std::string_view text) {
  size_t taken = 0;
  while (taken < text.size() && !is_gone_ && is_ready()) {
    // A pipe that polls as writable takes at least PIPE_BUF bytes at once.
    const size_t piece = std::min<size_t>(text.size() - taken, PIPE_BUF);
    const ssize_t written = ::write(handle_, text.data() + taken, piece);
    if (written >= 0) {
      taken += static_cast<size_t>(written);
    } else if (errno == EAGAIN) {
      return taken;
    } else if (errno != EINTR) {
      give_up(errno);
    }
  }
  return is_gone_ ? text.size() : taken;
}

void OutputStream::give_up(int error_number) {
  is_gone_ = true;
  // A pipe whose reader has closed it, or a closed terminal, does not count as a failure.
  if (error_number == EPIPE || (error_number == EIO && is_terminal_)) return;
  failure_ = errno_error(ErrorCode::kUnavailable, "write", error_number);
}

bool OutputStream::is_ready() const {
  pollfd item{.fd = handle_, .events = POLLOUT, .revents = 0};
  return ::poll(&item, 1, 0) > 0;
}

void fill_closed_streams() {
  // open() takes the lowest free number, so each call fills the stream that was just checked.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

int terminal_columns(int otherwise) {
  const Fd terminal(::open("/dev/tty", O_RDONLY | O_CLOEXEC | O_NOCTTY));
  winsize size{};
  if (!terminal.is_open() || ::ioctl(terminal.get(), TIOCGWINSZ, &size) != 0) return otherwise;
  return size.ws_col > 0 ? size.ws_col : otherwise;
}

bool outputs_are_one() {
  struct stat output {};
  struct stat error {};
  return ::fstat(STDOUT_FILENO, &output) == 0 && ::fstat(STDERR_FILENO, &error) == 0 &&
         output.st_dev == error.st_dev && output.st_ino == error.st_ino;
}

}  // namespace cadre::os
