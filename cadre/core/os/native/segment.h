// Shared memory on memfds, and the table that gives all ranks of one System the same mapping.
//
// Threads: SegmentTable from any thread. Blocking: never.
// Lifetime: a mapping lives as long as the SharedMemory objects that refer to it; the table has
// only weak references.
// Errors: kUnavailable when memory or descriptors are short, kCorruption for a descriptor that is
// not a sealed memfd, kInvalidArgument if the segment's descriptor was closed from outside (fd.h):
// then calls that need the descriptor fail, and those that need only the mapping still work.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/shared_pages.h"

namespace cadre::os {

// One mapping of one memfd; all ranks of this process that hold the segment share it.
class Mapping {
 public:
  Mapping(Fd fd, Bytes bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const Fd& fd() const { return fd_; }
  Bytes bytes() const { return bytes_; }

 private:
  Fd fd_;
  Bytes bytes_;
};

class NativeSharedMemory final : public SharedMemory, public SharedPages {
 public:
  explicit NativeSharedMemory(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}

  Bytes bytes() const override { return mapping_->bytes(); }
  Status reserve(size_t begin, size_t num_bytes) override;
  Status make_private(size_t begin, size_t num_bytes) override;
  Status release(size_t begin, size_t num_bytes) override;
  Result<std::unique_ptr<SharedMemory>> map_ranges(std::span<const size_t> begins,
                                                   size_t num_bytes) override;
  // Returns an error if the descriptor was closed from outside (Fd::check()). Called before each
  // use of the descriptor.
  Status check(std::string_view what) const { return mapping_->fd().check(what); }
  int fd() const { return mapping_->fd().get(); }

 private:
  std::shared_ptr<Mapping> mapping_;  // the other ranks of this System share it
};

class SegmentTable {
 public:
  // The function is exported because the simulator, which is installed too, creates segments with
  // it.
  CADRE_EXPORT Result<std::unique_ptr<SharedMemory>> create(size_t num_bytes);
  // Takes a descriptor that was received on a unix socket.
  Result<std::unique_ptr<SharedMemory>> adopt(Fd fd);

 private:
  using Inode = std::pair<dev_t, ino_t>;

  Result<std::unique_ptr<SharedMemory>> map(Fd fd);

  std::mutex mutex_;
  std::map<Inode, std::weak_ptr<Mapping>> mappings_;  // mutex_ guards it
};

}  // namespace cadre::os
