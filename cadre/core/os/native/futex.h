// The futex calls used by WaitWord and Waiter.
//
// Threads: any, of any process that maps the word, because the futexes are of the shared kind,
// which the kernel identifies by the page and not by the address. Blocking: futex_wait, for
// `budget` at most.
// Source: Drepper, "Futexes Are Tricky" (2011); futex(2).
#pragma once

#include <atomic>
#include <cstdint>

#include "cadre/core/base/deadline.h"

namespace cadre::os {

// Sleeps while word == old. Spurious wake-ups are possible.
void futex_wait(std::atomic<uint32_t>& word, uint32_t old, Duration budget);
void futex_wake_all(std::atomic<uint32_t>& word);

}  // namespace cadre::os
