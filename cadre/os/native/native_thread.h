// A named kernel thread.
//
// Threads: join() from the owner. Blocking: join(), until the body has returned; the end of the
// process, for 2 s at most while bodies of run_detached() run.
// Errors: Error(kUnavailable) when the system has no thread left.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "cadre/os/system.h"

namespace cadre::os {

class NativeThread final : public Thread {
 public:
  NativeThread(std::string name, std::function<void()> body);

  void join() override;

 private:
  std::thread thread_;
};

// Runs the body in a thread that nobody joins: for what a thread cannot do because it would wait
// for its own end. The body throws nothing, and keeps what it uses.
void run_detached(std::string name, std::function<void()> body);

}  // namespace cadre::os
