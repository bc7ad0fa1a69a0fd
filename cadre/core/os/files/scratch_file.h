// A file without a name, for what does not fit in memory: it grows as it is written, and its space
// is free again when the process ends, however that happens.
//
// Threads: any. Blocking: for the time of the disk; what is written lies in the page cache until
// the kernel wants the memory. Lifetime: the destructor gives the space back. Errors: kUnavailable
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
  // kCorruption if less was written there.
  Status read(uint64_t offset, Bytes bytes) const;
  const std::string& folder() const { return folder_; }
  const Fd& fd() const { return fd_; }  // to map it
  // As Fd::check(): before the descriptor is used.
  Status check_own() const;

 private:
  ScratchFile(Fd fd, std::string folder) : fd_(std::move(fd)), folder_(std::move(folder)) {}

  Fd fd_;
  std::string folder_;
};

}  // namespace cadre::os
