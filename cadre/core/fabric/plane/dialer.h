// Opens control connections to other ranks without blocking the control plane.
//
// Threads: the owner's thread, and the thread of each BackgroundConnect. Blocking: stop(), at most
// 1 s. Lifetime: borrows the System, the Layout, the identity, the event and the log. Errors: none;
// advance() returns an Outcome for each dial. A dial for which this process has no thread or
// descriptor left is retried.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/fabric/bootstrap/background_connect.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/os/system.h"

namespace cadre {

// The addresses of ranks and the identity of this rank in handshakes.
struct DialPlan {
  const Layout& layout;
  const LinkIdentity& identity;
  // The host part of the address at which this rank reaches the store. If a peer has several
  // addresses, this rank prefers the one with this host.
  std::string store_host;
};

class Dialer {
 public:
  enum class Ending {
    kConnected,
    kRefused,     // no process listens at the peer's address
    kUnanswered,  // the host does not answer
    kSilent,      // the connection was opened, but no byte arrived within the limit of silence
  };
  struct Outcome {
    int peer = -1;
    Ending ending = Ending::kRefused;
    std::unique_ptr<os::Socket> socket;  // null unless `ending` is kConnected
  };

  // `wake_up` is notified when the owner has to call advance().
  Dialer(os::System& system, DialPlan plan, Duration silence_limit, os::Event& wake_up,
         LogSink& log);
  ~Dialer();

  // REQUIRES: !is_dialing(peer).
  void dial(int peer);
  bool is_dialing(int peer) const;
  // Cancels a dial. A dial whose handshake has begun goes on, because the peer may already have
  // accepted the connection.
  void drop(int peer);
  // Advances all dials without blocking. Returns those that have ended.
  std::vector<Outcome> advance();
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Cancels all dials and joins their threads.
  void stop();

 private:
  struct Call {
    int peer = -1;
    Deadline give_up{TimePoint{}};
    TimePoint not_before{};
    std::unique_ptr<BackgroundConnect> attempt{};
    std::optional<Handshake> handshake{};
    Duration silent_for{0};
    bool is_dropped = false;
  };

  void begin(Call& call);
  void retry_later(Call& call, const Error& error);
  std::optional<Outcome> step(Call& call, Duration since_last);
  std::optional<Outcome> take_connection(Call& call);
  std::optional<Outcome> step_handshake(Call& call, Duration since_last);

  os::System& system_;
  const DialPlan plan_;
  const Duration silence_limit_;
  os::Event& wake_up_;
  LogSink& log_;
  std::vector<Call> calls_;
  TimePoint advanced_at_;
};

}  // namespace cadre
