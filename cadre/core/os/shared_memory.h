// A segment of memory that several processes map: a memfd, so nothing in /dev/shm to leak.
//
// Threads: the mapping may be used by any thread; the object has one owner. Blocking: never.
// Lifetime: unmapped by the destructor; the memory goes with its last mapping and descriptor.
// All ranks that are threads of one System share one mapping of a segment, else ThreadSanitizer
// would see unrelated addresses and prove nothing.
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

  // The whole mapping, page-aligned and zeroed at creation.
  virtual Bytes bytes() const = 0;
};

}  // namespace cadre::os
