// Opens a connection in a thread of its own, because System::connect() blocks.
//
// Threads: one owner, and a short-lived thread ("cadre-dial") for the connect(), which take() and
// the destructor join. Blocking: the destructor, until the present slice of the connect() has
// ended, at most 1 s. Lifetime: borrows the System and the event. Errors: begin() throws the Error
// of System::spawn(); take() returns that of System::connect().
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"

namespace cadre {

class BackgroundConnect {
 public:
  // Tries to connect until the connection is open, no process listens at the address, drop() was
  // called, or the deadline has passed. `wake_up` is notified when take() has a result. If there is
  // no address but an error, the error is the result.
  BackgroundConnect(os::System& system, Result<os::Address> address, Deadline give_up,
                    os::Event& wake_up);
  ~BackgroundConnect();
  BackgroundConnect(const BackgroundConnect&) = delete;
  BackgroundConnect& operator=(const BackgroundConnect&) = delete;

  // Lets the connect() end within a second.
  void drop() { attempt_->is_dropped = true; }
  // Returns the result once; nullopt while the connect() is in progress.
  std::optional<Result<std::unique_ptr<os::Socket>>> take();

 private:
  struct Attempt {
    std::atomic<bool> is_dropped{false};
    std::mutex mutex;
    std::optional<Result<std::unique_ptr<os::Socket>>> result;
  };

  const std::shared_ptr<Attempt> attempt_;  // shared with the thread
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
