// Chooses the size from which an operation uses its second algorithm, from measured times.
//
// Threads: pure functions. Blocking: never. Errors: none.
// At each measured size, the choice of an algorithm costs its relative additional time over the
// other one, as far as this exceeds kTimeMargin. The chosen size has the least sum of these costs.
// So a single wrong measurement moves it only if it outweighs all sizes in between, and differences
// within the margin do not move it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace cadre::cli {

struct TimedSize {
  uint64_t num_bytes = 0;
  double first_us = 0;   // the time with the first algorithm
  double second_us = 0;  // the time with the second algorithm
};

inline constexpr double kTimeMargin = 0.05;

// Returns one of the measured sizes, or twice the largest of them if the first algorithm is the
// better one at all sizes. If several sizes cost the same, returns the smallest of them. Returns
// nullopt if the times differ by no more than the margin at all sizes. REQUIRES: the sizes ascend,
// and the times are positive.
std::optional<uint64_t> crossing_of(std::span<const TimedSize> times);

}  // namespace cadre::cli
