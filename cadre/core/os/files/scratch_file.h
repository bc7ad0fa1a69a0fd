// A file without a name, for data that does not fit in memory. The file grows as it is written, and
// its space is free again when the process ends, in whatever way.
//
// Threads: any. Blocking: for the time of the disk; written data stays in the page cache until the
// kernel needs the memory. Lifetime: the destructor frees the space. Errors: kUnavailable
// with the folder and the system's reason (no folder, full disk); kInvalidArgument where the
// descriptor was closed from outside (fd.h).
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {

class CADRE_EXPORT ScratchFile {
 public:
  static Result<ScratchFile> make(const std::string& folder);

  // offset: in bytes.
  Status write(uint64_t offset, ConstBytes bytes) const;
  // Fails with kCorruption if fewer than bytes.size() bytes were written from `offset` on.
  Status read(uint64_t offset, Bytes bytes) const;
  const std::string& folder() const { return folder_; }
  const Fd& fd() const { return fd_; }  // for mapping the file
  // Returns an error if the descriptor was closed from outside (Fd::check()). Called before each
  // use of the descriptor.
  Status check_own() const;

 private:
  ScratchFile(Fd fd, std::string folder) : fd_(std::move(fd)), folder_(std::move(folder)) {}

  Fd fd_;
  std::string folder_;
};

}  // namespace cadre::os
