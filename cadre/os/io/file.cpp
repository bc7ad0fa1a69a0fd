#include "cadre/os/io/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"
#include "cadre/os/io/fd.h"

namespace cadre::os {
namespace {

constexpr size_t kReadChunk = 64 << 10;

Status write_all(int fd, ConstBytes content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("write {}", path), errno);
    }
    content = content.subspan(static_cast<size_t>(written));
  }
  return {};
}

Status sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: a file system that cannot sync folders has no ordering to lose.
  if (!fd.is_open() || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("sync folder {}", folder), errno);
  }
  return {};
}

// The temporary file: removed by the destructor unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target) : path_(target + ".XXXXXX") {
    fd_ = Fd(::mkostemp(path_.data(), O_CLOEXEC));
  }
  ~TemporaryFile() {
    if (fd_.is_open() && !is_renamed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

  Status rename_to(const std::string& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("rename {} to {}", path_, target),
                         errno);
    }
    is_renamed_ = true;
    return {};
  }

 private:
  std::string path_;
  Fd fd_;
  bool is_renamed_ = false;
};

}  // namespace

Result<std::string> read_file(const std::string& path, size_t max_bytes) {
  // Without waiting: the name may be that of a FIFO without a writer.
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
    // One byte over the bound tells a file that is too large from one that just fits.
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
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{} has more than {} bytes, the most that is read", path, max_bytes));
    }
  }
}

Status replace_file(const std::string& path, ConstBytes content) {
  TemporaryFile temporary(path);
  if (temporary.fd() < 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("create {}", temporary.path()),
                       errno);
  }
  CADRE_RETURN_IF_ERROR(write_all(temporary.fd(), content, temporary.path()));
  if (::fchmod(temporary.fd(), kNewFileMode) != 0 || ::fsync(temporary.fd()) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("sync {}", temporary.path()), errno);
  }
  CADRE_RETURN_IF_ERROR(temporary.rename_to(path));
  return sync_folder_of(path);
}

}  // namespace cadre::os
