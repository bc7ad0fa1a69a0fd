// Deadlines are absolute points in time that a call passes to the calls it makes, so that all of
// them together share one timeout.
//
// Threads: plain values. Blocking: never. Errors: none.
// No Deadline is infinite: each is a finite point on its clock. Sums and differences saturate, so
// `now + Duration::max()` is at most the last TimePoint. Clocks live in cadre/core/os (real time)
// and cadre/core/sim (virtual time); base has only the values.
#pragma once

#include <chrono>
#include <compare>
#include <concepts>
#include <cstdint>
#include <limits>

namespace cadre {

using Duration = std::chrono::nanoseconds;

// Converts a duration in coarser units to nanoseconds. A value out of range, such as
// seconds::max(), saturates; the conversion of std::chrono would overflow.
template <std::integral Rep, typename Period>
constexpr Duration to_duration(std::chrono::duration<Rep, Period> time) {
  using Given = std::chrono::duration<int64_t, Period>;
  const Given given(time.count());
  if (given > std::chrono::duration_cast<Given>(Duration::max())) return Duration::max();
  if (given < std::chrono::duration_cast<Given>(Duration::min())) return Duration::min();
  return given;
}

// A point in time, in nanoseconds since the epoch of the clock that returned it. The real clock is
// CLOCK_MONOTONIC, which all processes of a host share; the simulated clock starts with the
// simulation.
struct TimePoint {
  int64_t ns = 0;

  friend constexpr auto operator<=>(TimePoint, TimePoint) = default;
  friend constexpr TimePoint operator+(TimePoint t, Duration d) {
    TimePoint sum;
    if (__builtin_add_overflow(t.ns, d.count(), &sum.ns)) sum.ns = end_towards(d.count());
    return sum;
  }
  friend constexpr Duration operator-(TimePoint a, TimePoint b) {
    int64_t difference = 0;
    if (__builtin_sub_overflow(a.ns, b.ns, &difference)) difference = end_towards(a.ns);
    return Duration(difference);
  }

 private:
  static constexpr int64_t end_towards(int64_t sign) {
    return sign < 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  }
};

class Deadline {
 public:
  constexpr explicit Deadline(TimePoint at) : at_(at) {}

  constexpr TimePoint at() const { return at_; }
  constexpr bool has_passed(TimePoint now) const { return now >= at_; }
  // Returns the time left at `now`; zero once the deadline has passed.
  constexpr Duration remaining(TimePoint now) const {
    return now >= at_ ? Duration::zero() : at_ - now;
  }
  constexpr Deadline earlier(Deadline other) const { return at_ <= other.at_ ? *this : other; }
  constexpr Deadline later(Deadline other) const { return at_ <= other.at_ ? other : *this; }

  friend constexpr auto operator<=>(Deadline, Deadline) = default;

 private:
  TimePoint at_;
};

}  // namespace cadre
