// A word that threads of one or several processes wait on: the shape that lives in shared memory.
//
// Threads: any thread of any process that maps it. Blocking: see System::wait_while.
// Lifetime: as long as the mapping. Not std::atomic::wait, whose futex is private to a process and
// knows no deadline.
#pragma once

#include <atomic>
#include <cstdint>

namespace cadre::os {

// `value` is what is waited on; `sleepers` lets publish() skip the system call when nobody sleeps.
struct WaitWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
};
static_assert(sizeof(WaitWord) == 8 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace cadre::os
