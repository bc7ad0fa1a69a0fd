#include "cadre/launch/cli/tune/crossing.h"

#include <algorithm>

namespace cadre::cli {
namespace {

// Returns the cost of an algorithm that takes `chosen` if the other one takes `other`.
double cost_of(double chosen, double other) {
  return std::max(0.0, chosen / other - 1 - kTimeMargin);
}

}  // namespace

std::optional<uint64_t> crossing_of(std::span<const TimedSize> times) {
  if (times.empty()) return std::nullopt;
  const size_t num_sizes = times.size();
  bool differs = false;
  size_t best = 0;
  double least = 0;
  // The cost if the first `i` sizes use the first algorithm, minus the cost if none does.
  double cost = 0;
  for (size_t i = 0; i < num_sizes; ++i) {
    const double first = cost_of(times[i].first_us, times[i].second_us);
    const double second = cost_of(times[i].second_us, times[i].first_us);
    differs = differs || first > 0 || second > 0;
    cost += first - second;
    if (cost >= least) continue;
    least = cost;
    best = i + 1;
  }
  if (!differs) return std::nullopt;
  return best < num_sizes ? times[best].num_bytes : 2 * times.back().num_bytes;
}

}  // namespace cadre::cli
