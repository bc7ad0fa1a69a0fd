// The sends and receives of a group: who moves them, who waits for them, and what a failure means.
//
// Threads: all methods from any thread; one thread of its own ("cadre-messages") while asynchronous
// messages are issued (idle_thread.h). Blocking: run(), wait() of an issued message, and drain(),
// until the message's deadline and the questions that follow a failure. No lock is held while
// messages move or a thread waits. Lifetime: shared by the Works it handed out, which may outlive
// the group; close() first, then its parts may go. Errors: the group's failure, the same one each
// time; wait() in a forked child throws. What moving messages throws becomes the failure of the
// group. issue() throws kUnavailable, and has issued nothing, when the thread cannot be started.
//
// Progress is a role, as in operation_queue.h: its holder moves all pending messages of this rank,
// so that two ranks that both send first do not wait for each other. Who posts while another holds
// the role wakes it; else the holder sleeps until bytes come or go, a deadline or a failure.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/comm/failure/monitor.h"
#include "cadre/comm/flight_recorder.h"
#include "cadre/comm/fork_guard.h"
#include "cadre/comm/messages/point_to_point.h"
#include "cadre/comm/queue/held_role.h"
#include "cadre/comm/queue/idle_thread.h"
#include "cadre/comm/work.h"
#include "cadre/os/system.h"
#include "cadre/transport/transport.h"

namespace cadre {

class MessageQueue : public std::enable_shared_from_this<MessageQueue> {
 public:
  struct Parts {
    os::System& system;
    Monitor& monitor;
    FlightRecorder& recorder;
    Transport& transport;
    Duration timeout;                             // of messages without a deadline
    std::shared_ptr<const ForkGuard> fork_guard;  // shared with the group
  };
  explicit MessageQueue(const Parts& parts);
  ~MessageQueue();

  // The other rank, which is the sender's for a receive from any source.
  Rank run(Message message);
  Work issue(Message message);

  bool is_idle() const;
  // Whether a message has not ended.
  bool has_pending() const;
  // New messages throw `reason` from now on.
  void refuse(const Error& reason);
  // Until nothing is left (true) or the deadline has passed.
  bool drain(Deadline deadline);
  // Joins the thread; what drain() left ends with an error. A message that a waiting caller is
  // ending stays that caller's, who needs the parts until the queue is idle.
  void close();

 private:
  class Pending;  // a Message and Work::State
  friend class HeldRole<MessageQueue>;

  std::shared_ptr<Pending> post(Message message, bool needs_thread);
  // Under the lock; if it does not run. The result is to be joined without the lock.
  [[nodiscard]] std::unique_ptr<os::Thread> start_thread(OpKind first);
  void wait_for(const Pending& pending, std::optional<Deadline> deadline);
  bool try_take_role();  // under the lock
  void release_role();
  void run_thread();
  // With the role: moves messages until this one is done; null: until none is left.
  void progress(const Pending* until);
  void move_messages(const Pending* until);
  void give_up(const Error& error);
  // With the role: ends what has not ended.
  void end_all(const Error& error);
  void start_posted();
  // Tells the other ranks what this one does.
  void show(const Pending& pending);
  void finish(Pending& pending, Status status);
  // Makes the failure of the group out of what one message reported.
  Error explain(const Pending& pending, const Error& error);
  void explain_loss(const Pending& pending, const wire::Activity& activity, const Error& error);

  const Parts parts_;
  PointToPoint protocol_;  // the role's

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Pending>> posted_;  // not yet moved by the holder of the role
  size_t num_pending_ = 0;
  uint64_t num_issued_ = 0;
  bool is_role_taken_ = false;
  std::atomic<bool> is_stopping_ = false;
  std::optional<Error> refusal_;
  std::vector<os::Waiter*> waiting_;
  IdleThread thread_;
};

}  // namespace cadre
