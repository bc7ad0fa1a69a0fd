#include "cadre/core/os/io/fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "cadre/core/base/format.h"

namespace cadre::os {
namespace {

// All descriptors of kinds such as eventfd and epoll share one inode, which has no file type. So
// each of the library's descriptors of such a kind gets a mark: a signal number that is set with
// F_SETSIG, for asynchronous notification. The kernel keeps it with the open file description,
// sends nothing unless O_ASYNC is set, and a new description has none.
constexpr int kMarkShift = 56;      // the position of the mark in the number of the inode
constexpr uint32_t kNumMarks = 64;  // the marks are the signal numbers 1 to 64

bool shares_inode(const struct statx& info) {
  return (info.stx_mask & STATX_TYPE) != 0 && (info.stx_mode & S_IFMT) == 0;
}

uint64_t mark_of(int number) {
  const int mark = ::fcntl(number, F_GETSIG);
  return mark > 0 ? static_cast<uint64_t>(mark) << kMarkShift : 0;
}

// Gives each new descriptor the next mark in turn, so that a descriptor of the library that reuses
// the number of an earlier one has a different mark. Descriptors belong to the process, and so does
// the counter. If fcntl() fails, descriptors of one kind cannot be distinguished.
void mark(int number) {
  static std::atomic<uint32_t> last{0};
  const uint32_t turn = last.fetch_add(1, std::memory_order_relaxed);
  ::fcntl(number, F_SETSIG, static_cast<int>(turn % kNumMarks + 1));
}

}  // namespace

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
  const int error_number = errno;
  struct statx info {};
  if (::statx(number_, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO | STATX_TYPE, &info) ==
          0 &&
      shares_inode(info)) {
    mark(number_);
  }
  errno = error_number;
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

// Reads only attributes that the kernel has cached: a query to a network file system would take
// time, and NFS would first send all written data. Returns nullopt if there is no such descriptor.
// Leaves errno unchanged.
std::optional<Fd::Inode> Fd::inode_of(int number) {
  const int error_number = errno;
  struct statx info {};
  std::optional<Inode> inode = Inode();
  if (::statx(number, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO | STATX_TYPE, &info) == 0) {
    const uint64_t own = shares_inode(info) ? mark_of(number) : 0;
    inode = Inode{info.stx_dev_major, info.stx_dev_minor, info.stx_ino ^ own};
  } else if (errno == EBADF) {
    inode = std::nullopt;
  }
  errno = error_number;
  return inode;
}

// Returns true also if the file system has no inode numbers to compare.
bool Fd::is_own() const {
  const std::optional<Inode> inode = inode_of(number_);
  return inode && (*inode == inode_ || inode->number == 0 || inode_.number == 0);
}

Status Fd::check(std::string_view what) const {
  if (is_own()) return {};
  return closed_from_outside(what, number_);
}

// The call is not repeated after EINTR, because Linux has closed the descriptor all the same.
void Fd::close() {
  if (number_ < 0) return;
  if (is_own()) ::close(number_);
  number_ = -1;
}

}  // namespace cadre::os
