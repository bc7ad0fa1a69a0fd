// The SharedFile of the operating system.
//
// Threads: one owner at a time. Blocking: for the time of the disk; taking a lock never waits.
// Lifetime: closed by the destructor; the kernel drops the locks of a process that dies, so nobody
// can leave a lock behind. Errors: kUnavailable with the path and the system's reason.
// The locks are of the open file (F_OFD_SETLK), so two handles of one process exclude each other
// too, and they work over NFS where flock would.
#pragma once

#include <sys/types.h>

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/file_system.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {

class CADRE_EXPORT LockedFile final : public SharedFile {
 public:
  static constexpr mode_t kOwnerOnly = 0600;
  static constexpr mode_t kReadableByAll = 0644;

  // Creates the file, if it is not there, with the rights of `mode` that the process' umask leaves.
  static Result<LockedFile> open(const std::string& path, mode_t mode = kOwnerOnly);

  Result<bool> try_lock() override;
  void unlock() override;
  Status enter() override;
  Result<bool> is_alone() override;
  void leave() override;
  Result<size_t> size() const override;
  Result<size_t> read_at(size_t offset, Bytes buffer) const override;
  Status append_at(size_t offset, ConstBytes data) override;
  Status truncate(size_t num_bytes) override;
  bool is_named() const override;
  Status remove() override;

 private:
  // As Fd::check(): before the descriptor is used.
  Status check_own() const;

  LockedFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  Fd fd_;
  std::string path_;
};

}  // namespace cadre::os
