#include "cadre/os/io/fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "cadre/base/format.h"

namespace cadre::os {

int move_from_standard_streams(int number) {
  const int moved = ::fcntl(number, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error_number = errno;
  ::close(number);
  errno = error_number;
  return moved;
}

Error closed_from_outside(std::string_view what, int number) {
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: file descriptor {} of Cadre was closed by other code of this "
                             "process, and its number may belong to another file now; let the "
                             "program close only descriptors that it has opened itself, without "
                             "closefrom() and without a loop over all numbers",
                             what, number))
      .with_details({.is_own_limit = true});
}

Fd::Fd(int number)
    : number_(number < 0 || number > STDERR_FILENO ? number : move_from_standard_streams(number)) {
  if (number_ < 0) return;
  inode_ = inode_of(number_).value_or(Inode());
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    close();
    number_ = std::exchange(other.number_, -1);
    inode_ = other.inode_;
  }
  return *this;
}

// What the kernel knows already: to ask a file system over a network would take its time, and NFS
// would first send all that was written. nullopt if there is no such descriptor; leaves errno.
std::optional<Fd::Inode> Fd::inode_of(int number) {
  const int error_number = errno;
  struct statx info {};
  std::optional<Inode> inode = Inode();
  if (::statx(number, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO, &info) == 0) {
    inode = Inode{info.stx_dev_major, info.stx_dev_minor, info.stx_ino};
  } else if (errno == EBADF) {
    inode = std::nullopt;
  }
  errno = error_number;
  return inode;
}

// A file system that cannot tell proves nothing.
bool Fd::is_own() const {
  const std::optional<Inode> inode = inode_of(number_);
  return inode && (*inode == inode_ || inode->number == 0 || inode_.number == 0);
}

Status Fd::check(std::string_view what) const {
  if (is_own()) return {};
  return closed_from_outside(what, number_);
}

// After EINTR Linux has closed the descriptor all the same, so there is nothing to repeat.
void Fd::close() {
  if (number_ < 0) return;
  if (is_own()) ::close(number_);
  number_ = -1;
}

}  // namespace cadre::os
