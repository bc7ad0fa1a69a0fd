// An Event on an eventfd.
//
// Threads: notify() from any thread; clear() from the polling one. Blocking: never.
#pragma once

#include "cadre/os/io/fd.h"
#include "cadre/os/socket.h"

namespace cadre::os {

class NativeEvent final : public Event {
 public:
  // Throws Error(kUnavailable) when the process has no descriptor left.
  NativeEvent();

  void notify() override;
  void clear() override;
  int poll_handle() const override { return fd_.get(); }

 private:
  Fd fd_;
};

}  // namespace cadre::os
