// A named kernel thread.
//
// Threads: join() from the owner. Blocking: join(), until the body has returned.
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

}  // namespace cadre::os
