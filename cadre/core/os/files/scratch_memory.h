// Memory that lies in a file on disk instead of in the machine's memory, for data that may be
// larger than that: the kernel keeps as much of it as fits and writes the rest to the disk.
//
// The file has no name, so nothing is left of it when its process ends, in whatever way.
// Threads: allocate() and reserve() from any; the bytes under the user's own rules. Blocking: for
// the time of the disk. Lifetime: a ScratchMemory keeps the file and gives its blocks back to the
// disk. A forked child shares the memory with its parent: it must not write to it, and what it
// destroys stays the parent's.
// Errors: kUnavailable with the folder, for a missing folder, a full disk, and a file that would be
// larger than the process may make one. Blocks are reserved before memory is handed out, so a write
// to it never ends the process by SIGBUS for want of disk space. kInvalidArgument where the file's
// descriptor was closed from outside (fd.h): memory that was handed out stays usable.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {

class ScratchMemory;

class CADRE_EXPORT ScratchArena : public std::enable_shared_from_this<ScratchArena> {
  struct Key {  // only create() can make one
    explicit Key() = default;
  };

 public:
  static Result<std::shared_ptr<ScratchArena>> create(const std::string& folder);
  ScratchArena(Key, Fd file, std::string folder);

  const std::string& folder() const { return folder_; }
  // Reserves blocks, in whole pages, for the calls of allocate() that follow.
  Status reserve(size_t num_bytes);
  // Whole pages, page-aligned and zeroed. num_bytes: at least 1.
  Result<ScratchMemory> allocate(size_t num_bytes);

  // num_bytes in whole pages.
  static size_t in_pages(size_t num_bytes);

 private:
  friend class ScratchMemory;

  Status reserve_up_to(size_t end);  // under the lock
  void free_blocks(size_t begin, size_t num_bytes);

  const Fd file_;
  const std::string folder_;
  const pid_t owner_;
  std::mutex mutex_;
  size_t end_ = 0;           // end of what was handed out; offsets are not used again
  size_t reserved_end_ = 0;  // end of the file's reserved blocks
};

class CADRE_EXPORT ScratchMemory {
 public:
  ScratchMemory(ScratchMemory&& other) noexcept;
  ScratchMemory& operator=(ScratchMemory&& other) noexcept;
  ~ScratchMemory();

  Bytes bytes() const { return bytes_; }

 private:
  friend class ScratchArena;
  ScratchMemory(std::shared_ptr<ScratchArena> arena, Bytes bytes, size_t offset)
      : arena_(std::move(arena)), bytes_(bytes), offset_(offset) {}

  std::shared_ptr<ScratchArena> arena_;  // shared by all memory in its file
  Bytes bytes_;
  size_t offset_ = 0;  // in the file
};

}  // namespace cadre::os
