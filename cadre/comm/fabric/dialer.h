// Opens control connections to other ranks without making the control plane wait.
//
// Threads: one owner, and a thread of its own ("cadre-dial") for each connection that the system is
// opening, joined when that is over. Blocking: stop() for a second at most.
// Lifetime: borrows the System, the Layout, the terms, the event and the log. Errors: how a dial
// ended.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/log.h"
#include "cadre/comm/bootstrap/handshake.h"
#include "cadre/comm/fabric/layout.h"
#include "cadre/os/system.h"

namespace cadre {

// Where ranks are, and what a connection between two of them is proved with.
struct DialPlan {
  const Layout& layout;
  const LinkTerms& terms;
  // Of several addresses in a card, the one at which the store is reached is taken.
  std::string store_host;
};

class Dialer {
 public:
  enum class Ending {
    kConnected,
    kRefused,     // nobody listens there any more
    kUnanswered,  // the host does not answer
    kSilent,      // connected, but the rank has said nothing for the limit of silence
  };
  struct Outcome {
    int peer = -1;
    Ending ending = Ending::kRefused;
    std::unique_ptr<os::Socket> socket;  // of kConnected
  };

  // `wake_up` is notified when an advance() has something to do.
  Dialer(os::System& system, DialPlan plan, Duration silence_limit, os::Event& wake_up,
         LogSink& log);
  ~Dialer();

  // REQUIRES: !is_dialing(peer).
  void dial(int peer);
  bool is_dialing(int peer) const;
  // Gives a dial up, unless it is so far that the other end may take it for a connection.
  void drop(int peer);
  // As far as all dials can go just now; those that have ended.
  std::vector<Outcome> advance();
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Gives all up and joins their threads.
  void stop();

 private:
  // A connection that a thread opens.
  struct Attempt {
    std::atomic<bool> is_dropped{false};
    std::mutex mutex;
    std::optional<Result<std::unique_ptr<os::Socket>>> result;
  };
  struct Call {
    int peer = -1;
    Deadline give_up{TimePoint{}};
    TimePoint not_before{};
    std::shared_ptr<Attempt> attempt{};  // shared with its thread
    std::unique_ptr<os::Thread> thread{};
    std::optional<Handshake> handshake{};
    Duration silent_for{0};
    bool is_dropped = false;
  };

  void begin(Call& call);
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
