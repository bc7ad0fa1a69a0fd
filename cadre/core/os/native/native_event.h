// An Event on an eventfd.
//
// Threads: notify() from any thread; clear() from the polling one. Blocking: never. An event whose
// descriptor was closed from outside (fd.h) does nothing; its poll ends within kHandleLook.
#pragma once

#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/handle_owner.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

class NativeEvent final : public Event, public HandleOwner {
 public:
  // Throws Error(kUnavailable) when the process has no descriptor left.
  NativeEvent();

  void notify() override;
  void clear() override;
  int poll_handle() const override { return fd_.get(); }
  bool owns_handle() const override { return fd_.is_own(); }

 private:
  Fd fd_;
};

}  // namespace cadre::os
