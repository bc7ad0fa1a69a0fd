#include "cadre/core/os/files/scratch_memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

size_t free_bytes_of(int fd) {
  struct statvfs status = {};
  if (::fstatvfs(fd, &status) != 0) return 0;
  return static_cast<size_t>(status.f_bavail) * status.f_frsize;
}

// Makes the file on file systems that have no O_TMPFILE. The file has a name only until the
// unlink().
Fd open_and_unlink(const std::string& folder) {
  std::string path = folder + "/cadre-scratch-XXXXXX";
  Fd fd(::mkostemp(path.data(), O_CLOEXEC));
  if (fd.is_open()) ::unlink(path.c_str());
  return fd;
}

}  // namespace

ScratchArena::ScratchArena(Key, Fd file, std::string folder)
    : file_(std::move(file)), folder_(std::move(folder)), owner_(::getpid()) {}

Result<std::shared_ptr<ScratchArena>> ScratchArena::create(const std::string& folder) {
  Fd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kNewFileMode));
  if (!file.is_open() && (errno == EOPNOTSUPP || errno == EISDIR)) file = open_and_unlink(folder);
  if (!file.is_open()) {
    return errno_error(
        ErrorCode::kUnavailable,
        cadre::format("make a scratch file in the folder \"{}\", which must exist on a disk",
                      folder),
        errno);
  }
  return std::make_shared<ScratchArena>(Key(), std::move(file), folder);
}

size_t ScratchArena::in_pages(size_t num_bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (num_bytes + page - 1) / page * page;
}

Status ScratchArena::reserve(size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  return reserve_up_to(end_ + in_pages(num_bytes));
}

Status ScratchArena::reserve_up_to(size_t end) {
  CADRE_RETURN_IF_ERROR(file_.check(cadre::format("use a scratch file in {}", folder_)));
  if (end <= reserved_end_) return {};
  const size_t begin = reserved_end_;
  const size_t num_bytes = end - begin;
  CADRE_RETURN_IF_ERROR(check_file_size(
      cadre::format("reserve {} bytes in folder \"{}\"", num_bytes, folder()), end));
  const int status = reserve_blocks(file_.get(), begin, num_bytes);
  if (status != 0) {
    free_blocks(begin, num_bytes);  // frees the blocks that fallocate has reserved
    return errno_error(
        ErrorCode::kUnavailable,
        cadre::format("reserve {} bytes in folder \"{}\", whose disk has {} bytes free", num_bytes,
                      folder(), free_bytes_of(file_.get())),
        status);
  }
  reserved_end_ = end;
  return {};
}

Result<ScratchMemory> ScratchArena::allocate(size_t num_bytes) {
  const size_t size = in_pages(num_bytes);
  size_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (const Status status = reserve_up_to(end_ + size); !status.ok()) return status.error();
    offset = std::exchange(end_, end_ + size);
  }
  void* const start = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(),
                             static_cast<off_t>(offset));
  if (start == MAP_FAILED) {
    const int error_number = errno;
    free_blocks(offset, size);
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("map {} bytes of a file in folder \"{}\"", size, folder()),
                       error_number);
  }
  return ScratchMemory(shared_from_this(), Bytes(static_cast<std::byte*>(start), size), offset);
}

// If the file system cannot free blocks, they stay until the file is removed.
void ScratchArena::free_blocks(size_t begin, size_t num_bytes) {
  if (::getpid() != owner_ || !file_.is_own()) return;
  ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
              static_cast<off_t>(num_bytes));
}

ScratchMemory::ScratchMemory(ScratchMemory&& other) noexcept
    : arena_(std::move(other.arena_)),
      bytes_(std::exchange(other.bytes_, {})),
      offset_(other.offset_) {}

ScratchMemory& ScratchMemory::operator=(ScratchMemory&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(bytes_, other.bytes_);
  std::swap(offset_, other.offset_);
  return *this;
}

ScratchMemory::~ScratchMemory() {
  if (bytes_.empty()) return;
  ::munmap(bytes_.data(), bytes_.size());
  arena_->free_blocks(offset_, bytes_.size());
}

}  // namespace cadre::os
