// The progress role of a queue while a thread holds it: given back when the holder is done, also
// when an exception leaves what it runs, so that no later call waits for a role that nobody holds.
//
// Threads: the holder. Blocking: for the queue's mutex. Lifetime: borrows the queue.
// Errors: none; release_role() must not throw.
#pragma once

namespace cadre {

// REQUIRES: the role has been taken for this thread.
template <typename Queue>
class HeldRole {
 public:
  explicit HeldRole(Queue& queue) : queue_(queue) {}
  ~HeldRole() { queue_.release_role(); }
  HeldRole(const HeldRole&) = delete;
  HeldRole& operator=(const HeldRole&) = delete;

 private:
  Queue& queue_;
};

}  // namespace cadre
