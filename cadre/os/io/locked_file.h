// A file that several processes append to: read at any place, appended under a lock, and removed by
// the last one that has it open.
//
// Threads: one owner at a time. Blocking: for the time of the disk; taking a lock never waits.
// Lifetime: closed by the destructor; the kernel drops the locks of a process that dies, so nobody
// can leave a lock behind. Errors: kUnavailable with the path and the system's reason.
// The locks are of the open file (F_OFD_SETLK), so two handles of one process exclude each other
// too, and they work over NFS where flock would.
#pragma once

#include <sys/types.h>

#include <string>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/os/io/fd.h"

namespace cadre::os {

class CADRE_EXPORT LockedFile {
 public:
  static constexpr mode_t kOwnerOnly = 0600;
  static constexpr mode_t kReadableByAll = 0644;

  // Creates the file, if it is not there, with the rights of `mode` that the process' umask leaves.
  static Result<LockedFile> open(const std::string& path, mode_t mode = kOwnerOnly);

  // The right to write. False while another handle has it.
  Result<bool> try_lock();
  void unlock();
  // Marks this handle as present; with the lock held it does not fail because of others.
  Status enter();
  // Whether no other handle is present. REQUIRES: enter() and the lock.
  Result<bool> is_alone();
  // Ends what enter() began, which closing does too; but by then the next one may have the lock.
  void leave();

  Result<size_t> size() const;
  // Up to buffer.size() bytes from `offset`; fewer at the end of the file.
  Result<size_t> read_at(size_t offset, Bytes buffer) const;
  // Writes at `offset`, the end. After an error the file ends there again.
  Status append_at(size_t offset, ConstBytes data);
  Status truncate(size_t num_bytes);
  // Whether the path still names this file: somebody may have removed it meanwhile.
  bool is_named() const;
  Status remove();

 private:
  LockedFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  Fd fd_;
  std::string path_;
};

}  // namespace cadre::os
