// What the kernel can do with the pages of shared memory. In the simulator, whose ranks are threads
// of one process, only release() and map_ranges() have an effect.
//
// Threads: any; other threads may use the memory meanwhile. Blocking: never. Lifetime: borrows the
// memory for the call. Errors: kUnavailable with the sizes when memory is short.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/os/shared_memory.h"

namespace cadre::os {

class SharedPages {
 public:
  virtual ~SharedPages() = default;

  // Allocates the pages of bytes [begin, begin + num_bytes) now. Otherwise a page is allocated by
  // its first access, which ends the process with SIGBUS if there is no memory for it.
  virtual Status reserve(size_t begin, size_t num_bytes) = 0;

  // Makes the pages of bytes [begin, begin + num_bytes) private: this process gets copies of them
  // at the same addresses. Other processes keep the old pages. Later writes of either side are not
  // visible to the other.
  virtual Status make_private(size_t begin, size_t num_bytes) = 0;

  // Gives the pages of bytes [begin, begin + num_bytes) back to the system. Afterwards they are
  // zero for all processes, must be reserved again before use, and are shared again if this process
  // had made them private. REQUIRES: whole pages.
  virtual Status release(size_t begin, size_t num_bytes) = 0;

  // Makes one mapping that shows the ranges of `num_bytes` bytes from each of `begins` side by
  // side. The mapping keeps the memory alive. It shows the shared pages, never those that this
  // process has made private. REQUIRES: whole pages.
  virtual Result<std::unique_ptr<SharedMemory>> map_ranges(std::span<const size_t> begins,
                                                           size_t num_bytes) = 0;
};

inline Status reserve_pages(SharedMemory& memory, size_t begin, size_t num_bytes) {
  auto* const pages = dynamic_cast<SharedPages*>(&memory);
  return pages == nullptr || num_bytes == 0 ? Status() : pages->reserve(begin, num_bytes);
}

inline Status make_pages_private(SharedMemory& memory, size_t begin, size_t num_bytes) {
  auto* const pages = dynamic_cast<SharedPages*>(&memory);
  return pages == nullptr || num_bytes == 0 ? Status() : pages->make_private(begin, num_bytes);
}

inline Status release_pages(SharedMemory& memory, size_t begin, size_t num_bytes) {
  auto* const pages = dynamic_cast<SharedPages*>(&memory);
  return pages == nullptr || num_bytes == 0 ? Status() : pages->release(begin, num_bytes);
}

}  // namespace cadre::os
