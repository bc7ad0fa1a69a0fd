// Checks whether the descriptor of a polled object still belongs to it.
//
// A poll does not notice that a descriptor was closed from outside (fd.h): it continues to wait for
// a number that is closed or belongs to a file of the program now. Therefore the native System
// checks the descriptors at least once in each kHandleLook of a wait, and reports objects that lost
// their descriptor as ready.
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

// The longest wait before the descriptors are checked again.
inline constexpr Duration kHandleLook = std::chrono::seconds(1);

// Returns whether the target still owns its descriptor; true for a target without a descriptor.
inline bool owns_handle(const Pollable& target) {
  const auto* owner = dynamic_cast<const HandleOwner*>(&target);
  return owner == nullptr || owner->owns_handle();
}

}  // namespace cadre::os
