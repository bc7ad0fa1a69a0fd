// Keeps an object until the process ends, because a thread or a library that cannot be stopped
// still uses it, or because objects that are destroyed at exit may.
//
// Threads: any. Blocking: never. Errors: std::bad_alloc; the object is then destroyed.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace cadre::os {

// Returns the object at the place where it stays.
template <typename T>
T& keep_until_exit(T object) {
  struct Kept {
    T object;
    Kept* next = nullptr;
  };
  // Leak checkers do not report memory that this list reaches.
  static std::atomic<Kept*> last{nullptr};
  Kept* const kept = std::make_unique<Kept>(Kept{std::move(object)}).release();
  kept->next = last.exchange(kept);
  return kept->object;
}

}  // namespace cadre::os
