// Mounts a file system (tmpfs) of a given size, so that a test can fill it.
//
// Threads: one owner. Lifetime: the destructor unmounts the file system; its files are lost when
// the last one is closed. Errors: is_there() is false if this process has no permission to mount a
// file system.
#pragma once

#include <sys/mount.h>

#include <string>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::testing {

class SmallDisk {
 public:
  explicit SmallDisk(size_t num_bytes)
      : is_there_(::mount("none", folder_.path().c_str(), "tmpfs", 0,
                          format("size={}", num_bytes).c_str()) == 0) {}
  ~SmallDisk() {
    if (is_there_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool is_there() const { return is_there_; }
  const TemporaryFolder& folder() const { return folder_; }

 private:
  TemporaryFolder folder_;
  bool is_there_;
};

}  // namespace cadre::testing
