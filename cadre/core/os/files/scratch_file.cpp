#include "cadre/core/os/files/scratch_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

// Linux reads or writes at most 2 GiB in one call.
constexpr size_t kMostInOneCall = size_t{1} << 30;

// Opens a file on file systems without O_TMPFILE: its name exists only for a moment.
Fd open_and_unlink(const std::string& folder) {
  std::string path = folder + "/cadre-scratch-XXXXXX";
  Fd fd(::mkostemp(path.data(), O_CLOEXEC));
  if (fd.is_open()) ::unlink(path.c_str());
  return fd;
}

}  // namespace

Result<ScratchFile> ScratchFile::make(const std::string& folder) {
  Fd fd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kNewFileMode));
  if (!fd.is_open() && (errno == EOPNOTSUPP || errno == EISDIR)) fd = open_and_unlink(folder);
  if (!fd.is_open()) {
    return errno_error(
        ErrorCode::kUnavailable,
        cadre::format("make a scratch file in the folder \"{}\", which must exist on a disk",
                      folder),
        errno);
  }
  return ScratchFile(std::move(fd), folder);
}

Status ScratchFile::check_own() const {
  return fd_.check(cadre::format("use a scratch file in {}", folder_));
}

Status ScratchFile::write(uint64_t offset, ConstBytes bytes) const {
  CADRE_RETURN_IF_ERROR(check_own());
  CADRE_RETURN_IF_ERROR(check_file_size(
      cadre::format("write {} bytes at {} of a scratch file in {}", bytes.size(), offset, folder_),
      offset + bytes.size()));
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(fd_.get(), bytes.data(), std::min(bytes.size(), kMostInOneCall),
                 static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return errno_error(ErrorCode::kUnavailable,
                         cadre::format("write {} bytes at {} of a scratch file in {}", bytes.size(),
                                       offset, folder_),
                         errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
  return {};
}

Status ScratchFile::read(uint64_t offset, Bytes bytes) const {
  CADRE_RETURN_IF_ERROR(check_own());
  while (!bytes.empty()) {
    const ssize_t got = ::pread(fd_.get(), bytes.data(), std::min(bytes.size(), kMostInOneCall),
                                static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    const std::string what =
        cadre::format("read {} bytes at {} of a scratch file in {}", bytes.size(), offset, folder_);
    if (got < 0) return errno_error(ErrorCode::kUnavailable, what, errno);
    if (got == 0) return Error(ErrorCode::kCorruption, what + ": the file ends before them");
    bytes = bytes.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return {};
}

}  // namespace cadre::os
