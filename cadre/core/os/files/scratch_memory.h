// Memory in a file on disk, for data that may be larger than the machine's memory: the kernel keeps
// as much of it in memory as fits and writes the rest to the disk.
//
// The file has no name, so it vanishes when its process ends, in whatever way.
// Threads: allocate() and reserve() from any; the caller synchronizes accesses to the bytes.
// Blocking: for the time of the disk. Lifetime: a ScratchMemory keeps the file open, and its
// destructor frees its blocks on the disk. A forked child shares the memory with its parent and
// must not write to it. A ScratchMemory that the child destroys frees no blocks of the parent.
// Errors: kUnavailable with the folder, for a missing folder, a full disk, and a file that would
// exceed the process' limit on file sizes. Blocks are reserved before memory is returned, so a
// write never ends the process with SIGBUS when the disk is full. kInvalidArgument if the file's
// descriptor was closed from outside (fd.h); memory from earlier calls stays usable.
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
  struct Key {  // only create() can make a Key
    explicit Key() = default;
  };

 public:
  static Result<std::shared_ptr<ScratchArena>> create(const std::string& folder);
  ScratchArena(Key, Fd file, std::string folder);

  const std::string& folder() const { return folder_; }
  // Reserves blocks, in whole pages, for later calls of allocate().
  Status reserve(size_t num_bytes);
  // Allocates memory in whole pages, page-aligned and filled with zeros. `num_bytes` is at least 1.
  Result<ScratchMemory> allocate(size_t num_bytes);

  // Returns `num_bytes` rounded up to whole pages.
  static size_t in_pages(size_t num_bytes);

 private:
  friend class ScratchMemory;

  Status reserve_up_to(size_t end);  // REQUIRES: mutex_ is locked
  void free_blocks(size_t begin, size_t num_bytes);

  const Fd file_;
  const std::string folder_;
  const pid_t owner_;
  std::mutex mutex_;
  size_t end_ = 0;           // the end of the allocated offsets, none of which is used again
  size_t reserved_end_ = 0;  // the end of the blocks that the file has reserved
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

  std::shared_ptr<ScratchArena> arena_;  // shared by all ScratchMemory objects in its file
  Bytes bytes_;
  size_t offset_ = 0;  // the offset in the file
};

}  // namespace cadre::os
