// A named kernel thread with a stack of at least 8 MiB, whatever RLIMIT_STACK is.
//
// Threads: join() from the owner. Blocking: join() and the destructor of a thread that was not
// joined wait until the body has returned; the end of the process waits for at most 2 s while
// bodies of run_detached() run. Errors: Error(kUnavailable) when the system has no thread or memory
// left.
#pragma once

#include <pthread.h>

#include <functional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/os/system.h"

namespace cadre::os {

class CADRE_EXPORT NativeThread final : public Thread {
 public:
  NativeThread(std::string name, std::function<void()> body);
  ~NativeThread() override { join(); }
  NativeThread(const NativeThread&) = delete;
  NativeThread& operator=(const NativeThread&) = delete;

  void join() override;

 private:
  pthread_t thread_{};
  bool is_joined_ = false;
};

// Runs the body in a thread that is never joined, for example to wait for the end of the calling
// thread. The body throws nothing, and owns what it uses.
CADRE_EXPORT void run_detached(std::string name, std::function<void()> body);

}  // namespace cadre::os
