#include "cadre/core/os/files/locked_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

// The locks are on two bytes far beyond the content; the bytes of the content are never locked.
constexpr off_t kWriterByte = off_t{1} << 62;
constexpr off_t kPresenceByte = kWriterByte + 1;

// Sets a lock (F_RDLCK, F_WRLCK, F_UNLCK) on one byte. Returns 0 or the errno.
int set_lock(int fd, short kind, off_t byte) {
  struct flock lock {};
  lock.l_type = kind;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  while (::fcntl(fd, F_OFD_SETLK, &lock) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

bool is_taken(int status) {
  return status == EAGAIN || status == EACCES;
}

}  // namespace

Result<LockedFile> LockedFile::open(const std::string& path, mode_t mode) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, mode));
  if (!fd.is_open()) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("open {}", path), errno);
  }
  return LockedFile(std::move(fd), path);
}

Status LockedFile::check_own() const {
  return fd_.check(cadre::format("use {}", path_));
}

Result<bool> LockedFile::try_lock() {
  CADRE_RETURN_IF_ERROR(check_own());
  const int status = set_lock(fd_.get(), F_WRLCK, kWriterByte);
  if (status == 0) return true;
  if (is_taken(status)) return false;
  return errno_error(ErrorCode::kUnavailable, cadre::format("lock {}", path_), status);
}

void LockedFile::unlock() {
  if (fd_.is_own()) set_lock(fd_.get(), F_UNLCK, kWriterByte);
}

Status LockedFile::enter() {
  CADRE_RETURN_IF_ERROR(check_own());
  const int status = set_lock(fd_.get(), F_RDLCK, kPresenceByte);
  if (status == 0) return {};
  return errno_error(ErrorCode::kUnavailable, cadre::format("lock {}", path_), status);
}

Result<bool> LockedFile::is_alone() {
  CADRE_RETURN_IF_ERROR(check_own());
  const int status = set_lock(fd_.get(), F_WRLCK, kPresenceByte);
  if (is_taken(status)) return false;
  if (status != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("lock {}", path_), status);
  }
  CADRE_RETURN_IF_ERROR(enter());
  return true;
}

void LockedFile::leave() {
  if (fd_.is_own()) set_lock(fd_.get(), F_UNLCK, kPresenceByte);
}

Result<size_t> LockedFile::size() const {
  CADRE_RETURN_IF_ERROR(check_own());
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("stat {}", path_), errno);
  }
  return static_cast<size_t>(info.st_size);
}

Result<size_t> LockedFile::read_at(size_t offset, Bytes buffer) const {
  CADRE_RETURN_IF_ERROR(check_own());
  size_t total = 0;
  while (total < buffer.size()) {
    const ssize_t received = ::pread(fd_.get(), buffer.data() + total, buffer.size() - total,
                                     static_cast<off_t>(offset + total));
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("read {}", path_), errno);
    }
    if (received == 0) break;
    total += static_cast<size_t>(received);
  }
  return total;
}

Status LockedFile::append_at(size_t offset, ConstBytes data) {
  CADRE_RETURN_IF_ERROR(check_own());
  CADRE_RETURN_IF_ERROR(check_file_size(cadre::format("write {}", path_), offset + data.size()));
  size_t total = 0;
  while (total < data.size()) {
    const ssize_t written = ::pwrite(fd_.get(), data.data() + total, data.size() - total,
                                     static_cast<off_t>(offset + total));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const Error error =
          errno_error(ErrorCode::kUnavailable, cadre::format("write {}", path_), errno);
      // If truncating fails as well, the next writer finds the incomplete end and truncates it.
      (void)truncate(offset);
      return error;
    }
    total += static_cast<size_t>(written);
  }
  return {};
}

Status LockedFile::truncate(size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(check_own());
  CADRE_RETURN_IF_ERROR(check_file_size(cadre::format("truncate {}", path_), num_bytes));
  if (::ftruncate(fd_.get(), static_cast<off_t>(num_bytes)) == 0) return {};
  return errno_error(ErrorCode::kUnavailable, cadre::format("truncate {}", path_), errno);
}

bool LockedFile::is_named() const {
  struct stat by_name {};
  struct stat by_handle {};
  return ::stat(path_.c_str(), &by_name) == 0 && ::fstat(fd_.get(), &by_handle) == 0 &&
         by_name.st_dev == by_handle.st_dev && by_name.st_ino == by_handle.st_ino;
}

Status LockedFile::remove() {
  if (::unlink(path_.c_str()) == 0 || errno == ENOENT) return {};
  return errno_error(ErrorCode::kUnavailable, cadre::format("remove {}", path_), errno);
}

}  // namespace cadre::os
