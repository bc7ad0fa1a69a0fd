// Whether the kernel's number of something that is polled still belongs to it.
//
// A poll does not notice that a descriptor was closed from outside (fd.h): it goes on waiting for
// what no number leads to any more, or waits for a file of the program. So the waits of the native
// System end now and then to ask, and report what is not their own any more as ready.
//
// Threads: any. Blocking: never. Lifetime: borrows the target for the call.
#pragma once

#include <chrono>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

class HandleOwner {
 public:
  virtual ~HandleOwner() = default;
  virtual bool owns_handle() const = 0;
};

// The longest wait before the handles are looked at again.
inline constexpr Duration kHandleLook = std::chrono::seconds(1);

// True for a target without a handle.
inline bool owns_handle(const Pollable& target) {
  const auto* owner = dynamic_cast<const HandleOwner*>(&target);
  return owner == nullptr || owner->owns_handle();
}

}  // namespace cadre::os
