#include "cadre/core/os/native/native_waiter.h"

#include "cadre/core/os/native/futex.h"
#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {

bool NativeWaiter::park(Deadline deadline) {
  while (is_unparked_.exchange(0, std::memory_order_acquire) == 0) {
    const TimePoint now = monotonic_now();
    if (deadline.has_passed(now)) return false;
    futex_wait(is_unparked_, 0, deadline.remaining(now));
  }
  return true;
}

void NativeWaiter::unpark() {
  // A second unpark before the park has no effect, and needs no system call.
  if (is_unparked_.exchange(1, std::memory_order_release) == 0) futex_wake_all(is_unparked_);
}

}  // namespace cadre::os
