// Simulates a full disk: while this object exists, no file of this process can grow beyond a size
// (RLIMIT_FSIZE).
//
// Threads: affects the whole process; construct and destroy it in one thread.
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
