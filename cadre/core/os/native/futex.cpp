#include "cadre/core/os/native/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <limits>

#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {

void futex_wait(std::atomic<uint32_t>& word, uint32_t old, Duration budget) {
  const timespec timeout = to_timespec(budget);
  // Callers check the word again after every outcome (woken, changed, timed out, interrupted).
  ::syscall(SYS_futex, &word, FUTEX_WAIT, old, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

}  // namespace cadre::os
