#include "cadre/os/io/durable_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"
#include "cadre/os/io/fd.h"

namespace cadre::os {
namespace {

// Linux writes at most 2 GiB a call; smaller pieces notice a full disk earlier.
constexpr size_t kWriteChunk = size_t{64} << 20;

Status write_piece(int fd, ConstBytes piece, const std::string& path) {
  while (!piece.empty()) {
    const ssize_t written = ::write(fd, piece.data(), std::min(piece.size(), kWriteChunk));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return errno_error(ErrorCode::kUnavailable, cadre::format("write {}", path), errno);
    }
    piece = piece.subspan(static_cast<size_t>(written));
  }
  return {};
}

Status sync_path(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  // EINVAL: a file system that cannot sync folders has no ordering to lose.
  if (!fd.is_open() || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("sync {}", path), errno);
  }
  return {};
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

Status write_and_sync(const std::string& path, std::span<const ConstBytes> pieces) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kNewFileMode));
  if (!fd.is_open()) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("create {}", path), errno);
  }
  for (const ConstBytes piece : pieces) CADRE_RETURN_IF_ERROR(write_piece(fd.get(), piece, path));
  if (::fsync(fd.get()) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("sync {}", path), errno);
  }
  return {};
}

Status rename_and_sync(const std::string& from, const std::string& to, unsigned flags) {
  CADRE_RETURN_IF_ERROR(sync_path(from));
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("rename {} to {}", from, to), errno);
  }
  return sync_path(folder_of(to));
}

}  // namespace

Status write_file(const std::string& path, std::span<const ConstBytes> pieces) {
  Status status = write_and_sync(path, pieces);
  if (!status.ok()) ::unlink(path.c_str());  // the first error is the one to report
  return status;
}

Result<std::string> create_file_beside(const std::string& path) {
  std::string name = path + ".XXXXXX";
  const Fd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.is_open() || ::fchmod(fd.get(), kNewFileMode) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("create a file beside {}", path),
                       errno);
  }
  return name;
}

Status rename_path(const std::string& from, const std::string& to) {
  return rename_and_sync(from, to, /*flags=*/0);
}

Status exchange_paths(const std::string& from, const std::string& to) {
  return rename_and_sync(from, to, RENAME_EXCHANGE);
}

}  // namespace cadre::os
