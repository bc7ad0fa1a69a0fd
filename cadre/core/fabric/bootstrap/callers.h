// The connections that other processes open to this rank while a group connects, until each has
// proved that it comes from a rank. An error on one ends that connection only, since any process
// may have opened it.
//
// Threads: one. Blocking: never. Lifetime: borrows the System, the identity and the listeners.
// Errors: none; an error of accept is kept for the message that no rank came.
// Strangers cost a bounded number of descriptors and a bounded time of each turn. A connection that
// has not proved itself within 1 s is dropped, and the oldest one earlier if there are too many.
// Once descriptors are short, fewer connections are kept, so that the rest of the process has some.
// A rank whose connection was dropped in this way calls again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/os/system.h"

namespace cadre {

class Callers {
 public:
  // The number of connections beyond the expected ones that may be waiting for their proof.
  static constexpr size_t kMaxStrangers = 64;

  Callers(os::System& system, const LinkIdentity& identity, std::vector<os::Listener*> listeners,
          size_t num_expected);

  // Accepts connections, advances all handshakes as far as the streams allow now, and returns those
  // that are done.
  std::vector<Handshake> advance();
  // From now on accepts no connection, and keeps only callers that were challenged and are about to
  // prove themselves.
  void stop_accepting();
  bool is_empty() const { return callers_.empty(); }

  // Adds what to poll before the next advance(), and until when at most.
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Returns why the last attempt to accept failed, as the end of a message; empty if it did not
  // fail.
  std::string accept_failure() const;

 private:
  struct Caller {
    Handshake handshake;
    Deadline deadline;
  };

  void accept(os::Listener& listener);
  bool may_accept() const { return is_accepting_ && system_.now() >= accept_after_; }
  bool make_room();
  bool drop_one();
  void step(std::vector<Handshake>& done);

  os::System& system_;
  const LinkIdentity& identity_;
  const std::vector<os::Listener*> listeners_;
  size_t max_callers_;           // is lowered when the process has run out of descriptors
  std::vector<Caller> callers_;  // the callers, in the order in which they came
  bool is_accepting_ = true;
  TimePoint accept_after_{};
  std::string failure_;  // says why the last attempt to accept a connection failed
};

}  // namespace cadre
