// Decides which of two processes opens a connection between them, when it does, how long one
// attempt may take, and when the next attempt follows.
//
// Threads: one at a time; the mutex of the PeerLink guards this object. Blocking: never. Errors:
// none. The thread that waits for a peer opens the connection itself and serves no other peer
// during that time. So the first attempt has a short time limit. After each attempt that timed out,
// the limit doubles, up to eight times the first one.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/core/base/deadline.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct DialTurn {
  enum class Step : uint8_t { kNone, kLater, kNow };
  Step step = Step::kNone;
  TimePoint at{};        // kLater: the time at which to call plan() again
  Duration patience{0};  // kNow: the time limit of the attempt
};

class DialSchedule {
 public:
  // `is_higher` says that this process has the higher rank of the two. The higher rank opens a
  // connection at once.
  explicit DialSchedule(bool is_higher) : is_higher_(is_higher) {}

  // Decides whether a thread that waits with this interest, and has no connection to send on, must
  // open one. If the result is kNow, the caller opens a connection and calls end(). No other caller
  // gets kNow before end(). `has_connection` says that the peer has opened a connection over which
  // no frame has come yet.
  DialTurn plan(const ChannelInterest& interest, bool has_connection, TimePoint now);
  // Called when a connection that the peer had opened has ended before its first frame. Either the
  // peer has given up opening it, or the connection was cut and bytes of the peer were lost. From
  // now on this process opens a connection also if it only receives. When the peer accepts the new
  // connection, it checks its own end of the earlier one.
  void note_lost_opening() { has_lost_opening_ = true; }
  enum class Ending : uint8_t { kConnected, kLate, kRefused };
  void end(Ending ending, TimePoint now);

 private:
  const bool is_higher_;
  bool is_dialing_ = false;
  bool has_lost_opening_ = false;
  int num_late_ = 0;                       // the number of attempts that timed out
  std::optional<TimePoint> wanted_since_;  // the time at which a connection was first wanted
  TimePoint retry_at_{};
  TimePoint optional_retry_at_{};  // the retry time of optional interests
};

}  // namespace cadre
