// A set of objects to poll that is kept between polls, for a server with thousands of idle clients.
// The cost of a wait depends on the number of ready objects, not on the number of watched ones.
//
// Threads: one owner. Blocking: wait(), until its Deadline. Lifetime: the System outlives the set;
// a watched object outlives the set or is forgotten first. Errors: the constructor and watch()
// throw Error(kInternal) when the kernel has no descriptors or memory left.
// Uses epoll for objects with a poll_handle(); uses System::poll in the simulator, and after the
// epoll descriptor was closed from outside (fd.h). An object whose descriptor was closed from
// outside is reported as ready within kHandleLook.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/system.h"

namespace cadre::os {

class PollSet {
 public:
  struct Ready {
    uint64_t key = 0;
    // can_read and can_write are both true for a stream that has ended or is broken, as with
    // System::poll().
    bool can_read = false;
    bool can_write = false;
  };

  explicit PollSet(System& system) : system_(system) {}
  PollSet(const PollSet&) = delete;
  PollSet& operator=(const PollSet&) = delete;

  // Adds the item's target, or changes for which events a watched target is polled. `key`
  // identifies the target. An item that wants neither reading nor writing is not polled.
  void watch(uint64_t key, const PollItem& item);
  // Removes the target, before it is destroyed. Unknown keys are ignored.
  void forget(uint64_t key);
  // Returns the ready objects; none if the deadline has passed. The span is valid until the next
  // call.
  std::span<const Ready> wait(Deadline deadline);

 private:
  struct Watched {
    PollItem item;
    bool is_in_kernel = false;
  };

  void wait_in_kernel(Deadline deadline);
  void wait_through_system(Deadline deadline);
  void add_closed();
  void change_in_kernel(int operation, uint64_t key, const PollItem& item);

  System& system_;
  Fd epoll_;  // is opened when the first object with a handle is watched
  std::unordered_map<uint64_t, Watched> watched_;
  std::vector<Ready> ready_;
};

}  // namespace cadre::os
