// Simulates a full disk: while this object exists, the kernel does not let any file of this process
// grow beyond a size.
//
// Threads: affects the whole process; make and destroy it in one thread. Blocking: never.
#pragma once

#include <signal.h>
#include <sys/resource.h>

namespace cadre::testing {

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) : previous_handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit limit = {.rlim_cur = num_bytes, .rlim_max = previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    ::signal(SIGXFSZ, previous_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit previous_ = {};
  sighandler_t previous_handler_;
};

}  // namespace cadre::testing
