#include "cadre/core/os/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

constexpr mode_t kReadableMode = 0644;
constexpr mode_t kPrivateMode = 0600;

}  // namespace

Result<MappedFile> MappedFile::create(const std::string& path, size_t num_bytes, Readers readers) {
  if (num_bytes == 0) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("map {} with 0 bytes; expected at least 1", path));
  }
  const std::string what = cadre::format("create {} with {} bytes", path, num_bytes);
  CADRE_RETURN_IF_ERROR(check_file_size(what, num_bytes));
  // Removes the name instead of overwriting the content, so a process that has the previous file
  // open still reads its complete content.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return errno_error(ErrorCode::kUnavailable, what, errno);
  }
  const Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
                     readers == Readers::kAll ? kReadableMode : kPrivateMode));
  if (!fd.is_open()) return errno_error(ErrorCode::kUnavailable, what, errno);
  const int status = reserve_blocks(fd.get(), 0, num_bytes);
  if (status != 0) return errno_error(ErrorCode::kUnavailable, what, status);
  void* start = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (start == MAP_FAILED) return errno_error(ErrorCode::kUnavailable, what, errno);
  return MappedFile(Bytes(static_cast<std::byte*>(start), num_bytes));
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace cadre::os
