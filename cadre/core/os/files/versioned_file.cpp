#include "cadre/core/os/files/versioned_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/regular_file.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

FileVersion version_of(const struct stat& status) {
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  return {.identity = identity_of(status),
          .num_bytes = static_cast<uint64_t>(status.st_size),
          .modified_ns = status.st_mtim.tv_sec * kNsPerSecond + status.st_mtim.tv_nsec};
}

}  // namespace

Result<FileVersion> file_version(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("stat {}", path), errno);
  }
  return version_of(status);
}

Result<VersionedFile> VersionedFile::open(const std::string& path) {
  struct stat status = {};
  Result<Fd> fd = open_regular_file(path, status);
  if (!fd.ok()) return fd.error();
  return VersionedFile(std::move(fd).value(), path, version_of(status));
}

Result<FileVersion> VersionedFile::current_version() const {
  struct stat status = {};
  if (::fstat(fd_.get(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("stat {}", path_), errno);
  }
  return version_of(status);
}

Status VersionedFile::read_at(size_t offset, Bytes out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("read {}", path_), errno);
    }
    if (count == 0) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{} was cut short: it had {} bytes when it was opened and ends at "
                                 "byte {} now",
                                 path_, version_.num_bytes, offset));
    }
    offset += static_cast<size_t>(count);
    out = out.subspan(static_cast<size_t>(count));
  }
  return {};
}

Result<ConstBytes> FilePieces::next() {
  const size_t num_left = static_cast<size_t>(file_.version().num_bytes) - offset_;
  buffer_.resize(std::min(kPieceBytes, num_left));
  CADRE_RETURN_IF_ERROR(file_.read_at(offset_, buffer_));
  offset_ += buffer_.size();
  return ConstBytes(buffer_);
}

std::string change_text(const FileVersion& before, const FileVersion& now) {
  if (before.identity != now.identity) {
    return "was replaced by another file";
  }
  if (before.num_bytes != now.num_bytes) {
    return cadre::format("has {} bytes instead of {}", now.num_bytes, before.num_bytes);
  }
  return "was written";
}

}  // namespace cadre::os
