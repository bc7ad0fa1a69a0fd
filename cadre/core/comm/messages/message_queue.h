// Runs the sends and receives of a group, and turns an error into the failure of the group.
//
// Threads, blocking, lifetime and errors are those of ProgressQueue; the thread is
// "cadre-messages". An exception while messages are sent or received becomes the failure of the
// group.
//
// The holder of the progress role makes progress on all pending messages of this rank, so that two
// ranks that both send first do not wait for each other. It sleeps until bytes can be moved, a
// message is posted, a deadline passes, or the group fails.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/messages/message_space.h"
#include "cadre/core/comm/messages/point_to_point.h"
#include "cadre/core/comm/messages/send_gate.h"
#include "cadre/core/comm/queue/progress_queue.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

class MessageQueue final : public ProgressQueue {
 public:
  struct Parts {
    os::System& system;
    Monitor& monitor;
    FlightRecorder& recorder;
    Transport& transport;
    Duration timeout;  // the limit for messages that have no deadline, counted from their start
    std::shared_ptr<const ForkGuard> fork_guard;  // the group uses it, too
    std::shared_ptr<LogSink> log;  // the group uses it, too; if null, log lines are dropped
  };
  explicit MessageQueue(const Parts& parts);

  // Sends or receives a message. Returns the peer; for a receive from any source, the sender. The
  // bytes of a send are read when `is_written` returns true.
  Rank run(const MessageCall& call, const MessageSpace& space, CollectiveOptions options,
           SendGate is_written = {});
  // Posts all calls together, or throws and posts none. Returns one Work for each. The gate is that
  // of all sends.
  std::vector<Work> issue(std::span<const MessageCall> calls, const MessageSpace& space,
                          const CollectiveOptions& options, const SendGate& is_written = {});

 private:
  class Pending;  // consists of a Message and an IssuedOperation

  void advance(const IssuedOperation* until) override;
  void end_moving(const Error& error) override;
  void wake_holder() override { parts_.transport.wake(); }
  void fail(const Error& error);
  void move_messages(const IssuedOperation* until);
  // Starts the posted messages.
  void start_posted();
  // Publishes in the status page that this rank runs the message.
  void show(const Pending& pending);
  void finish(Pending& pending, Status status);
  // Turns the error of one message into the failure of the group, and returns that.
  Error explain(const Pending& pending, const Error& error);
  std::string where_of(const Pending& pending) const;
  // Called for a send that has timed out before the device has written its bytes.
  void explain_unwritten(const Pending& pending, const wire::Activity& activity);
  void explain_loss(const Pending& pending, const wire::Activity& activity, const Error& error);

  const Parts parts_;
  PointToPoint protocol_;  // only the holder of the progress role uses it
};

}  // namespace cadre
