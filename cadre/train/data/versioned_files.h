// Reads of many files by position that notice a changed file.
//
// Threads: any. Blocking: reads wait for the disk. Lifetime: up to 64 descriptors. Errors:
// kUnavailable for a file that cannot be opened or read; kInvalidArgument for a changed file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "cadre/core/base/types.h"
#include "cadre/core/os/files/versioned_file.h"

namespace cadre {

// Keeps the most recently opened files open, so that a read need not open its file again. The
// caller gives each file an index.
class VersionedFiles {
 public:
  // Fills `out` with the bytes of the file from `offset` on. If the file then still has this
  // version, they are those of the version; if it has not, throws.
  void read(size_t index, const std::string& path, const os::FileVersion& version, uint64_t offset,
            Bytes out);

 private:
  static constexpr size_t kMaxOpen = 64;
  struct Entry {
    size_t index;
    std::shared_ptr<const os::VersionedFile> file;  // shared with the reads that use it
  };

  std::shared_ptr<const os::VersionedFile> get(size_t index, const std::string& path);

  std::mutex mutex_;
  std::deque<Entry> files_;
};

}  // namespace cadre
