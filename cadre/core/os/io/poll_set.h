// Many things to poll, kept between polls: what a server with thousands of idle clients waits on. A
// wait costs as much as there is ready, not as much as is watched.
//
// Threads: one owner. Blocking: wait(), until its Deadline. Lifetime: the System and everything
// watched outlive the set, or are forgotten first. Errors: Error(kInternal) thrown by the
// constructor and watch() when the kernel has no descriptors or memory left.
// Over epoll for what has a poll_handle(); over System::poll in the simulator, and after the epoll
// was closed from outside (fd.h). What was closed from outside is ready, within kHandleLook.
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
    bool can_read = false;  // an ended or broken stream is both, as with System::poll
    bool can_write = false;
  };

  explicit PollSet(System& system) : system_(system) {}
  PollSet(const PollSet&) = delete;
  PollSet& operator=(const PollSet&) = delete;

  // Watches the item's target from now on, or changes what is wanted of it; `key` names it. One
  // that wants nothing is passed over.
  void watch(uint64_t key, const PollItem& item);
  // Before the target goes. Unknown keys are ignored.
  void forget(uint64_t key);
  // What is ready, empty at the deadline; valid until the next call.
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
  Fd epoll_;  // open once something with a handle is watched
  std::unordered_map<uint64_t, Watched> watched_;
  std::vector<Ready> ready_;
};

}  // namespace cadre::os
