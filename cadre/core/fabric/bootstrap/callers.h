// The connections that other processes open to this rank while a group connects, until each has
// proved that it comes from a rank. An error on a connection closes only that connection, since any
// process may have opened it.
//
// Threads: one. Blocking: never. Lifetime: borrows the System, the identity and the listeners.
// Errors: none. The error of a failed accept() is kept for the message of a later timeout.
// Connections of foreign processes ("strangers") use a bounded number of descriptors and a bounded
// time of each advance(). A connection is dropped unless the other end proves within 1 s that it is
// a rank. If there are too many connections, the oldest one is dropped earlier. When the process
// runs out of descriptors, fewer connections are kept, so that the rest of the process can open
// some. A rank whose connection was dropped connects again.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/os/system.h"

namespace cadre {

class Callers {
 public:
  // The number of connections, beyond the expected ones, that may be open before they have proved
  // that they come from ranks.
  static constexpr size_t kMaxStrangers = 64;

  Callers(os::System& system, const LinkIdentity& identity, std::vector<os::Listener*> listeners,
          size_t num_expected);

  // Accepts connections, advances all handshakes as far as possible without blocking, and returns
  // those that are done.
  std::vector<Handshake> advance();
  // Ends the accepting of connections. Drops all callers except those that have received this
  // rank's challenge and still have to answer it.
  void stop_accepting();
  bool is_empty() const { return callers_.empty(); }

  // Appends the items to poll before the next advance().
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Returns why the last accept() failed, as a text to append to a message; an empty text if it did
  // not fail.
  std::string accept_failure() const;
  // Returns, since the last call, why connections were dropped, at most kMaxRefusals texts such as
  // "tcp:10.0.0.9:40112: it has not proved within 1 s that it has the job's token".
  std::vector<std::string> take_refusals() { return std::exchange(refusals_, {}); }
  static constexpr size_t kMaxRefusals = 8;

 private:
  struct Caller {
    Handshake handshake;
    Deadline deadline;
  };

  void accept(os::Listener& listener);
  bool may_accept() const { return is_accepting_ && system_.now() >= accept_after_; }
  bool make_room();
  bool drop_one();
  void note_refusal(const Handshake& handshake, std::string_view reason);
  void step(std::vector<Handshake>& done);

  os::System& system_;
  const LinkIdentity& identity_;
  const std::vector<os::Listener*> listeners_;
  size_t max_callers_;           // is lowered when the process has run out of descriptors
  std::vector<Caller> callers_;  // the callers in the order in which they connected
  bool is_accepting_ = true;
  TimePoint accept_after_{};
  std::string failure_;  // the reason why the last accept() failed; empty if it did not
  std::vector<std::string> refusals_;
};

}  // namespace cadre
