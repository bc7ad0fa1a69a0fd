// Calls a function in a forked child, while this process forwards signals to it and waits.
//
// Threads: the only one of the process (count_threads()). Blocking: until the child has ended.
// Lifetime: the child ends, with SIGTERM, when this process is killed. Errors: kUnavailable when
// the machine has no process or descriptor left.
#pragma once

#include <functional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/proc/exit_status.h"

namespace cadre::os {

// Where the child leaves a text for its parent.
class MessageToParent {
 public:
  // A pipe holds so many bytes although nobody reads from it.
  static constexpr size_t kMaxBytes = 32 << 10;

  explicit MessageToParent(Fd pipe) : pipe_(std::move(pipe)) {}
  // Longer texts are cut. Call it once.
  void write(std::string text) const;

 private:
  Fd pipe_;
};

struct ForkedCallEnd {
  int pid = 0;
  ExitStatus status;    // the code is what the function returned
  std::string message;  // what the child has left; else empty
  int signal = 0;       // the first signal that this process got and forwarded; 0 if none
};

// The child ends with what `body` returns, without destructors of static objects and functions of
// atexit(). SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to it and have no effect on this
// process; the caller raises ForkedCallEnd::signal again if it should have one.
Result<ForkedCallEnd> call_in_fork(const std::function<int(const MessageToParent&)>& body);

}  // namespace cadre::os
