// A word in shared memory on which threads of one or several processes wait.
//
// Threads: any thread of any process that maps it. Blocking: see System::wait_while.
// Lifetime: as long as the mapping. It does not use std::atomic::wait, whose futex is private to a
// process and has no deadline.
#pragma once

#include <atomic>
#include <cstdint>

namespace cadre::os {

// `value` is the word that is compared; `sleepers` lets publish() skip the system call if no thread
// sleeps.
struct WaitWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
};
static_assert(sizeof(WaitWord) == 8 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace cadre::os
