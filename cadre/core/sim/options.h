// Options of a simulation: the hosts, the properties of the network and the planned faults.
//
// Threads: plain values.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"

namespace cadre::sim {

// A kind of fault. The simulation counts how often each kind had an effect, so that a test can show
// that it happened.
enum class FaultKind {
  kDelay,         // a packet arrived after many times the usual latency
  kReorder,       // a packet overtook one of another connection that was sent earlier
  kSlowLink,      // a packet crossed a slow link
  kShortIo,       // a send or a receive moved fewer bytes than it could have
  kSpuriousWake,  // a wait on a word returned spuriously
  kCut,           // a connection that was open at both ends was reset
  kKill,          // a rank was killed
  kPartition,     // a packet was held back by a partition
  kHeal,          // a packet that a partition had held back went on when the partition ended
  kStop,          // a rank was stopped, as by SIGSTOP
  kContinue,      // a stopped rank was continued, as by SIGCONT
};
inline constexpr int kNumFaultKinds = 11;
CADRE_EXPORT std::string_view to_string(FaultKind kind);

class FaultCounts {
 public:
  void add(FaultKind kind) { ++counts_[static_cast<size_t>(kind)]; }
  int64_t of(FaultKind kind) const { return counts_[static_cast<size_t>(kind)]; }

 private:
  std::array<int64_t, kNumFaultKinds> counts_{};
};

// The time of a fault: a point in virtual time, or the n-th scheduling point of a rank. Each call
// that a rank makes to its System is a scheduling point, counted from 1.
struct When {
  std::optional<TimePoint> time;
  int rank = 0;
  int64_t point = 0;

  static When at_time(Duration since_start) { return {.time = TimePoint{} + since_start}; }
  static When at_point(int rank, int64_t point) { return {{}, rank, point}; }
};

struct Fault {
  FaultKind kind = FaultKind::kKill;  // is kCut, kKill, kPartition, kHeal, kStop or kContinue
  When when;
  // The ranks or hosts that the fault affects. kKill, kStop and kContinue affect rank `a`, kCut all
  // connections between ranks `a` and `b`, kPartition and kHeal the link between hosts `a` and `b`.
  int a = 0;
  int b = 0;
  // The time after which kHeal or kContinue follows automatically; only kPartition and kStop have
  // it.
  std::optional<Duration> duration = {};

  static Fault kill(int rank, When when) { return {FaultKind::kKill, when, rank, 0, {}}; }
  static Fault stop(int rank, When when) { return {FaultKind::kStop, when, rank, 0, {}}; }
  static Fault cut(int rank, int other, When when) {
    return {FaultKind::kCut, when, rank, other, {}};
  }
  static Fault partition(int host, int other, When when) {
    return {FaultKind::kPartition, when, host, other, {}};
  }
  static Fault heal(int host, int other, When when) {
    return {FaultKind::kHeal, when, host, other, {}};
  }
  Fault lasting(Duration time) const {
    Fault copy = *this;
    copy.duration = time;
    return copy;
  }
};

struct SimOptions {
  // Ranks are numbered host by host: {2, 2} puts ranks 0 and 1 on host 0.
  std::vector<int> ranks_per_host = {};
  std::vector<Fault> faults = {};

  // The bounds of the random one-way latency between two hosts; within a host it is a tenth of
  // that.
  Duration min_latency = std::chrono::microseconds(5);
  Duration max_latency = std::chrono::microseconds(100);
  // The probability that a packet takes 50 times as long as usual.
  double delay_probability = 1.0 / 32;
  // The probability that two hosts have 1 MB/s and 10 times the latency.
  double slow_link_probability = 1.0 / 8;
  // The probability that a send or receive moves only a random part.
  double short_io_probability = 1.0 / 4;
  double spurious_wake_probability = 1.0 / 16;
  // The largest number of bytes in one direction that are in flight or unread.
  size_t stream_capacity = 64 << 10;

  // The longest sleep of wait_while. The default is the System's limit. With a longer one, a lost
  // wake-up becomes a timeout that a test can see.
  Duration max_nap = std::chrono::milliseconds(20);
  // A simulation with more scheduling points is ended and reported as endless.
  int64_t max_points = 2'000'000;
  // Whether SimResult contains the history and its hash. A large job may not need them, or may not
  // have the memory for them.
  bool keeps_history = true;
  // The real time within which a running thread must call its System, also with slow sanitizers. A
  // thread that does not call it blocks all others and cannot be unwound, so the process ends with
  // the thread's name.
  std::chrono::seconds stall_limit{30};
};

}  // namespace cadre::sim
