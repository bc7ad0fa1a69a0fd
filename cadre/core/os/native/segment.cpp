#include "cadre/core/os/native/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

// If a peer could shrink the file, every access of the others would end in SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// When a signal interrupts fallocate(), the kernel frees what the call has allocated, so each call
// reserves only a part.
constexpr size_t kReservedAtOnce = 16 << 20;

// A mapping of parts of a segment.
class MappedRanges final : public SharedMemory {
 public:
  explicit MappedRanges(Bytes bytes) : bytes_(bytes) {}
  ~MappedRanges() override { ::munmap(bytes_.data(), bytes_.size()); }
  Bytes bytes() const override { return bytes_; }

 private:
  Bytes bytes_;
};

}  // namespace

Mapping::~Mapping() {
  ::munmap(bytes_.data(), bytes_.size());
}

Status NativeSharedMemory::reserve(size_t begin, size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(check("reserve shared memory"));
  const size_t end = begin + num_bytes;
  for (size_t at = begin; at < end;) {
    const size_t size = std::min(kReservedAtOnce, end - at);
    if (::fallocate(fd(), 0, static_cast<off_t>(at), static_cast<off_t>(size)) == 0) {
      at += size;
    } else if (errno != EINTR) {
      return errno_error(
          ErrorCode::kUnavailable,
          cadre::format("reserve {} bytes of shared memory (free memory of the host, raise the "
                        "limit of its cgroup, or use less)",
                        num_bytes),
          errno);
    }
  }
  return {};
}

// Maps the pages again as copy-on-write. The kernel replaces the mapping in one step, so no write
// of another thread is lost. Until a page is copied it shows what other processes write, so the
// copy of each page is forced by an atomic write that changes nothing. A fetch_or of 0 would not
// do: compilers turn it into a load.
Status NativeSharedMemory::make_private(size_t begin, size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(check("make shared memory private"));
  const auto page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t first = begin / page_bytes * page_bytes;
  const Bytes pages = bytes().subspan(
      first,
      std::min((begin + num_bytes + page_bytes - 1) / page_bytes * page_bytes, bytes().size()) -
          first);
  if (::mmap(pages.data(), pages.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd(),
             static_cast<off_t>(first)) == MAP_FAILED) {
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("make {} bytes of a shared segment private", pages.size()),
                       errno);
  }
  for (size_t at = 0; at < pages.size(); at += page_bytes) {
    const std::atomic_ref byte(pages[at]);
    std::byte value = byte.load(std::memory_order_relaxed);
    while (!byte.compare_exchange_weak(value, value, std::memory_order_relaxed)) {
    }
  }
  return {};
}

// The range is mapped again, because pages that were made private are copies of this process only.
Status NativeSharedMemory::release(size_t begin, size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(check("give back shared memory"));
  int status = 0;
  do {
    status = ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(begin), static_cast<off_t>(num_bytes));
  } while (status != 0 && errno == EINTR);
  if (status != 0 ||
      ::mmap(bytes().data() + begin, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             fd(), static_cast<off_t>(begin)) == MAP_FAILED) {
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("give back {} bytes of a shared segment", num_bytes), errno);
  }
  return {};
}

// Reserves the addresses first, so that no other mapping can come between the ranges.
Result<std::unique_ptr<SharedMemory>> NativeSharedMemory::map_ranges(std::span<const size_t> begins,
                                                                     size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(check("map ranges of shared memory"));
  const size_t total = begins.size() * num_bytes;
  const auto failed = [&] {
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("map {} ranges of {} bytes of a shared segment side by side",
                                     begins.size(), num_bytes),
                       errno);
  };
  void* start =
      ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return failed();
  auto ranges = std::make_unique<MappedRanges>(Bytes(static_cast<std::byte*>(start), total));
  for (size_t i = 0; i < begins.size(); ++i) {
    if (::mmap(ranges->bytes().data() + i * num_bytes, num_bytes, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, fd(), static_cast<off_t>(begins[i])) == MAP_FAILED) {
      return failed();
    }
  }
  return std::unique_ptr<SharedMemory>(std::move(ranges));
}

Result<std::unique_ptr<SharedMemory>> SegmentTable::create(size_t num_bytes) {
  if (num_bytes == 0) {
    return Error(ErrorCode::kInvalidArgument, "a shared segment of 0 bytes; expected at least 1");
  }
  CADRE_RETURN_IF_ERROR(
      check_file_size(cadre::format("size a shared segment to {} bytes", num_bytes), num_bytes));
  Fd fd(::memfd_create("cadre", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_open()) return errno_error(ErrorCode::kUnavailable, "memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(num_bytes)) != 0) {
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("size a shared segment to {} bytes", num_bytes), errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return errno_error(ErrorCode::kUnavailable, "seal a shared segment", errno);
  }
  return map(std::move(fd));
}

Result<std::unique_ptr<SharedMemory>> SegmentTable::adopt(Fd fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Error(ErrorCode::kCorruption,
                 cadre::format("a received descriptor is not a sealed shared segment (seals {}); "
                               "check that the peer runs the same version",
                               seals));
  }
  return map(std::move(fd));
}

Result<std::unique_ptr<SharedMemory>> SegmentTable::map(Fd fd) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) {
    return errno_error(ErrorCode::kInternal, "fstat a shared segment", errno);
  }
  const std::scoped_lock lock(mutex_);
  // Removes entries of dead mappings, so the table only contains living ones.
  std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& known = mappings_[{info.st_dev, info.st_ino}];
  if (std::shared_ptr<Mapping> mapping = known.lock()) {
    return std::unique_ptr<SharedMemory>(std::make_unique<NativeSharedMemory>(std::move(mapping)));
  }
  const auto num_bytes = static_cast<size_t>(info.st_size);
  void* start = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (start == MAP_FAILED) {
    return errno_error(ErrorCode::kUnavailable,
                       cadre::format("map a shared segment of {} bytes", num_bytes), errno);
  }
  // The segment is left out of core files: to write one, the kernel would read each page, and most
  // pages of a segment have no memory yet.
  ::madvise(start, num_bytes, MADV_DONTDUMP);
  auto mapping =
      std::make_shared<Mapping>(std::move(fd), Bytes(static_cast<std::byte*>(start), num_bytes));
  known = mapping;
  return std::unique_ptr<SharedMemory>(std::make_unique<NativeSharedMemory>(std::move(mapping)));
}

}  // namespace cadre::os
