#include "cadre/os/files/read_only_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/os/files/regular_file.h"
#include "cadre/os/io/errno_error.h"

namespace cadre::os {

Result<ReadOnlyFile> ReadOnlyFile::open(const std::string& path) {
  struct stat status = {};
  const Result<Fd> fd = open_regular_file(path, status);
  if (!fd.ok()) return fd.error();
  const auto num_bytes = static_cast<size_t>(status.st_size);
  if (num_bytes == 0) return ReadOnlyFile(ConstBytes());  // mmap refuses an empty file
  void* start = ::mmap(nullptr, num_bytes, PROT_READ, MAP_SHARED, fd->get(), 0);
  if (start == MAP_FAILED) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("map {}", path), errno);
  }
  return ReadOnlyFile(ConstBytes(static_cast<const std::byte*>(start), num_bytes));
}

ReadOnlyFile::ReadOnlyFile(ReadOnlyFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})) {}

ReadOnlyFile& ReadOnlyFile::operator=(ReadOnlyFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

ReadOnlyFile::~ReadOnlyFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace cadre::os
