// Decides which of two processes opens a connection between them, when it does, how long one
// attempt may take, and when the next attempt follows.
//
// Threads: one at a time; the link's mutex guards it. Blocking: never. Errors: none. A thread that
// waits opens the connection itself and looks at nothing else meanwhile, so the first attempts are
// short, and each that was too short is followed by one of twice the time.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct DialTurn {
  enum class Step : uint8_t { kNone, kLater, kNow };
  Step step = Step::kNone;
  TimePoint at{};        // for kLater, the time at which to ask again
  Duration patience{0};  // for kNow, the time that the attempt may take
};

class DialSchedule {
 public:
  // `is_higher` says that this process has the higher rank of the two, and opens at once.
  explicit DialSchedule(bool is_higher) : is_higher_(is_higher) {}

  // Plans for a wait with this interest, while there is no connection to send on. After kNow the
  // caller opens a connection and calls end(); until then no other caller gets kNow.
  // `has_connection` says that the peer has opened a connection on which no frame has come yet.
  DialTurn plan(const ChannelInterest& interest, bool has_connection, TimePoint now);
  // Called when a connection that the peer had opened has ended before its first frame. The peer
  // may have given it up, or it was cut together with what the peer had sent on it. So from now on
  // this process opens a connection also to receive, which makes the peer check its own end.
  void note_lost_opening() { has_lost_opening_ = true; }
  enum class Ending : uint8_t { kConnected, kLate, kRefused };
  void end(Ending ending, TimePoint now);

 private:
  const bool is_higher_;
  bool is_dialing_ = false;
  bool has_lost_opening_ = false;
  int num_late_ = 0;                       // the number of attempts that took too long
  std::optional<TimePoint> wanted_since_;  // the time at which a connection was first wanted
  TimePoint retry_at_{};
  TimePoint optional_retry_at_{};  // as retry_at_, for optional interests
};

}  // namespace cadre
