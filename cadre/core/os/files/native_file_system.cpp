#include "cadre/core/os/files/native_file_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/files/locked_file.h"
#include "cadre/core/os/files/mapped_file.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

constexpr mode_t kNewFolderMode = 0755;

// Linux writes at most 2 GiB in one call; with smaller pieces a full disk is noticed earlier.
constexpr size_t kWriteChunk = size_t{64} << 20;

Status status_of(int result, std::string_view what, const std::string& path) {
  if (result == 0) return {};
  return errno_error(ErrorCode::kUnavailable, cadre::format("{} {}", what, path), errno);
}

class NativeOutputFile final : public OutputFile {
 public:
  NativeOutputFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  Status write(ConstBytes data) override {
    CADRE_RETURN_IF_ERROR(check_own());
    CADRE_RETURN_IF_ERROR(
        check_file_size(cadre::format("write {}", path_), num_written_ + data.size()));
    while (!data.empty()) {
      const ssize_t written = ::write(fd_.get(), data.data(), std::min(data.size(), kWriteChunk));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return status_of(-1, "write", path_);
      data = data.subspan(static_cast<size_t>(written));
      num_written_ += static_cast<size_t>(written);
    }
    return {};
  }
  Status sync() override {
    CADRE_RETURN_IF_ERROR(check_own());
    return status_of(::fsync(fd_.get()), "sync", path_);
  }

 private:
  Status check_own() const {
    if (fd_.is_own()) return {};
    return closed_from_outside(cadre::format("write {}", path_), fd_.get());
  }

  const Fd fd_;
  const std::string path_;
  uint64_t num_written_ = 0;  // the file was empty when it was opened
};

class NativeSizedFile final : public SizedFile {
 public:
  explicit NativeSizedFile(MappedFile file) : file_(std::move(file)) {}
  Bytes bytes() override { return file_.bytes(); }

 private:
  const MappedFile file_;
};

Status rename_with(const std::string& from, const std::string& to, unsigned flags) {
  return status_of(::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags),
                   cadre::format("rename {} to", from), to);
}

}  // namespace

Result<std::unique_ptr<OutputFile>> NativeFileSystem::create(const std::string& path) {
  // O_NONBLOCK is set because the path may be a FIFO, whose opening would wait for a reader.
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
               kNewFileMode));
  struct stat info = {};
  if (!fd.is_open() || ::fstat(fd.get(), &info) != 0) {
    return status_of(-1, "create", path).error();
  }
  if (!S_ISREG(info.st_mode)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("create {}: a pipe, a socket or a device has this name; expected a "
                               "regular file or an unused name",
                               path));
  }
  return std::unique_ptr<OutputFile>(std::make_unique<NativeOutputFile>(std::move(fd), path));
}

Result<std::unique_ptr<SizedFile>> NativeFileSystem::create_sized(const std::string& path,
                                                                  size_t num_bytes) {
  Result<MappedFile> file = MappedFile::create(path, num_bytes);
  if (!file.ok()) return file.error();
  return std::unique_ptr<SizedFile>(std::make_unique<NativeSizedFile>(std::move(file).value()));
}

Result<std::string> NativeFileSystem::create_beside(const std::string& path) {
  std::string name = path + ".XXXXXX";
  const Fd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (fd.is_open() && ::fchmod(fd.get(), kNewFileMode) == 0) return name;
  const Error error = status_of(-1, "create a file beside", path).error();
  if (fd.is_open()) ::unlink(name.c_str());
  return error;
}

Result<std::string> NativeFileSystem::make_folder_beside(const std::string& path) {
  std::string name = path + ".XXXXXX";
  const bool is_made = ::mkdtemp(name.data()) != nullptr;
  if (is_made && ::chmod(name.c_str(), kNewFolderMode) == 0) return name;
  const Error error = status_of(-1, "make a folder beside", path).error();
  if (is_made) ::rmdir(name.c_str());
  return error;
}

Result<std::unique_ptr<SharedFile>> NativeFileSystem::open_shared(const std::string& path) {
  Result<LockedFile> file = LockedFile::open(path);
  if (!file.ok()) return file.error();
  return std::unique_ptr<SharedFile>(std::make_unique<LockedFile>(std::move(file).value()));
}

Result<std::string> NativeFileSystem::read(const std::string& path, size_t max_bytes) {
  return read_file(path, max_bytes);
}

Result<std::optional<FileKind>> NativeFileSystem::kind_of(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) == 0) {
    if (S_ISLNK(status.st_mode)) return std::optional(FileKind::kLink);
    return std::optional(S_ISDIR(status.st_mode) ? FileKind::kFolder : FileKind::kFile);
  }
  if (errno == ENOENT || errno == ENOTDIR) return std::optional<FileKind>();
  return status_of(-1, "look at", path).error();
}

Result<std::vector<std::string>> NativeFileSystem::list(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("list {}", folder), error.value());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Status NativeFileSystem::make_folder(const std::string& path) {
  return status_of(::mkdir(path.c_str(), 0777), "make the folder", path);
}

Status NativeFileSystem::sync(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open()) return status_of(-1, "sync", path);
  // EINVAL means that the file system cannot sync folders, which counts as success.
  if (::fsync(fd.get()) == 0 || errno == EINVAL) return {};
  return status_of(-1, "sync", path);
}

Status NativeFileSystem::rename(const std::string& from, const std::string& to) {
  return rename_with(from, to, /*flags=*/0);
}

Status NativeFileSystem::exchange(const std::string& from, const std::string& to) {
  return rename_with(from, to, RENAME_EXCHANGE);
}

Status NativeFileSystem::remove(const std::string& path) {
  return status_of(::remove(path.c_str()), "remove", path);
}

}  // namespace cadre::os
