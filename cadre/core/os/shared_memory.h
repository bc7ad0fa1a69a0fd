// A segment of memory that several processes map: a memfd, so no file can stay behind in /dev/shm.
//
// Threads: the mapping may be used by any thread; the object has one owner. Blocking: never.
// Lifetime: unmapped by the destructor; the memory is freed with its last mapping and descriptor.
// All ranks that are threads of one System share one mapping of a segment; otherwise
// ThreadSanitizer would see unrelated addresses and find no races.
#pragma once

#include <cstddef>

#include "cadre/core/base/types.h"

namespace cadre::os {

class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Returns the whole mapping, which is page-aligned and was zeroed at creation.
  virtual Bytes bytes() const = 0;
};

}  // namespace cadre::os
