// Executes the CPU's pause instruction, which a spin loop should contain: it leaves execution
// resources to the sibling hyper-thread and reduces memory traffic.
//
// Threads: any. Blocking: some tens of nanoseconds.
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
