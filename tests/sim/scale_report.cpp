#include "scale_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::testing {
namespace {

void write(const std::string& line) {
  std::fputs(line.c_str(), stdout);
}

}  // namespace

std::string_view to_string(Cost cost) {
  constexpr std::array<std::string_view, kNumCosts> kNames = {
      "store requests",   "store bytes in", "store bytes out", "control connections",
      "control messages", "control bytes",  "heartbeats",      "data connections",
      "data frames",      "data bytes"};
  return kNames[static_cast<size_t>(cost)];
}

size_t ScaleReport::add(Phase phase) {
  phase.at_end.resize(static_cast<size_t>(num_ranks_));
  phases_.push_back(std::move(phase));
  return phases_.size() - 1;
}

// Returns the cost of the phase for each rank that was alive at its end.
std::vector<uint64_t> ScaleReport::spent(size_t phase, Cost cost) const {
  std::vector<uint64_t> values;
  for (size_t rank = 0; rank < static_cast<size_t>(num_ranks_); ++rank) {
    const auto& at_end = phases_[phase].at_end[rank];
    if (!at_end) continue;
    const auto before =
        phase == 0 ? std::optional<Costs>(Costs()) : phases_[phase - 1].at_end[rank];
    values.push_back((*at_end)[cost] - (*before)[cost]);
  }
  return values;
}

int ScaleReport::print() const {
  int num_broken = 0;
  write(format("{:<14} {:<20} {:>13} {:>12} {:>11} {:>14}\n", "phase", "cost", "total", "mean",
               "most", "bound of total"));
  for (size_t phase = 0; phase < phases_.size(); ++phase) {
    const Phase& now = phases_[phase];
    write(format("{:<14} {:.1f} ms of virtual time, {:.1f} s of real time\n", now.name,
                 now.virtual_ms, now.real_ms / 1000));
    for (int number = 0; number < kNumCosts; ++number) {
      const auto cost = static_cast<Cost>(number);
      const std::vector<uint64_t> values = spent(phase, cost);
      const auto total = std::accumulate(values.begin(), values.end(), uint64_t{0});
      const auto bound = std::ranges::find(now.bounds, cost, &Bound::cost);
      const bool is_bound = bound != now.bounds.end();
      if (total == 0 && !is_bound) continue;
      const auto num_values = static_cast<double>(std::max<size_t>(1, values.size()));
      write(format("{:<14} {:<20} {:>13} {:>12.1f} {:>11}", now.name, to_string(cost), total,
                   static_cast<double>(total) / num_values,
                   values.empty() ? 0 : std::ranges::max(values)));
      if (is_bound) write(format(" {:>14.0f}  {}", bound->most, bound->formula));
      const bool is_broken = is_bound && static_cast<double>(total) > bound->most;
      write(is_broken ? "  BROKEN\n" : "\n");
      num_broken += is_broken ? 1 : 0;
    }
  }
  return num_broken;
}

}  // namespace cadre::testing
