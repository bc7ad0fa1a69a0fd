// The SharedFile of the operating system.
//
// Threads: one owner at a time. Blocking: for the time of the disk; taking a lock never waits.
// Lifetime: closed by the destructor; the kernel drops the locks of a process that dies, so no lock
// stays behind. Errors: kUnavailable with the path and the system's reason. A lock belongs to the
// open file (F_OFD_SETLK), so two handles of one process exclude each other too. Unlike flock, such
// locks also work over NFS.
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

  // Creates the file, if it does not exist, with `mode` less the process' umask.
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
  // Returns an error if the descriptor was closed from outside (Fd::check()). Called before each
  // use of the descriptor.
  Status check_own() const;

  LockedFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  Fd fd_;
  std::string path_;
};

}  // namespace cadre::os
