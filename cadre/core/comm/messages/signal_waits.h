// The waits for signals of a group. Like other operations of the group they are shown in the status
// page and recorded, and their errors name the rank at fault.
//
// Threads: all methods from any thread. Blocking: wait(), until the signal arrives, its deadline
// passes, or the group fails or ends; after its deadline it also blocks while this rank polls its
// peers. drain(), until its deadline. Lifetime: shared by the symmetric buffers, which may outlive
// the group; after close() its parts may be destroyed. Errors: the group's failure, the same one
// each time; a timeout names the rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/os/system.h"
#include "cadre/core/os/wait_word.h"

namespace cadre {

class SignalWaits {
 public:
  struct Parts {
    os::System& system;
    Monitor& monitor;
    FlightRecorder& recorder;
    // There are more ranks than cores, so a wait yields its core at once.
    bool is_crowded = false;
  };
  // The condition for which a caller waits: rank `from` has incremented the word to `value`.
  struct Goal {
    os::WaitWord& word;
    uint32_t value = 0;
    Rank from = 0;
    uint32_t slot = 0;
  };

  explicit SignalWaits(const Parts& parts) : parts_(parts) {}

  void wait(const Goal& goal, Deadline deadline);
  // Waits until this rank has received the failure that a peer has found, for half a second at
  // most.
  void await_failure();

  bool is_idle() const { return num_waiting_.load(std::memory_order_acquire) == 0; }
  // Makes new waits throw `reason` from now on.
  void refuse(const Error& reason);
  // Returns true when no caller waits any more, and false when the deadline has passed.
  bool drain(Deadline deadline);
  // Ends the waits that drain() left pending, within System::kMaxNap.
  void close() { is_closed_.store(true, std::memory_order_release); }

 private:
  class Entry;

  Status run(const Goal& goal, Deadline deadline);
  Status sleep(const Goal& goal, Deadline deadline);
  Status check() const;

  const Parts parts_;
  std::atomic<uint64_t> num_issued_{0};
  std::atomic<int> num_waiting_{0};
  std::atomic<bool> is_closed_{false};
  mutable std::mutex mutex_;
  std::optional<Error> refusal_;
};

}  // namespace cadre
