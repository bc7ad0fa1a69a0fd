// Tells the core that this thread spins, so that its sibling thread and the memory bus get a rest.
//
// Threads: any. Blocking: for some tens of nanoseconds.
#pragma once

namespace cadre {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace cadre
