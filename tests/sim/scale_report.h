// Reports the costs of each phase of a large job for its processes, next to their bounds.
//
// Threads: one at a time. Blocking: never. Lifetime: a plain value. Errors: print() counts the
// costs that are above their bounds.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cadre::testing {

enum class Cost {
  kStoreRequests,
  kStoreBytesIn,
  kStoreBytesOut,
  kControlConnections,  // counts ends, so a connection between two processes counts twice
  kControlMessages,     // does not include heartbeats
  kControlBytes,        // includes heartbeats
  kHeartbeats,
  kDataConnections,  // counts ends
  kDataFrames,
  kDataBytes,
};
inline constexpr int kNumCosts = 10;
std::string_view to_string(Cost cost);

// The costs of one process since its start.
class Costs {
 public:
  uint64_t& operator[](Cost cost) { return values_[static_cast<size_t>(cost)]; }
  uint64_t operator[](Cost cost) const { return values_[static_cast<size_t>(cost)]; }

 private:
  std::array<uint64_t, kNumCosts> values_{};
};

// An upper bound of the cost of all processes together in one phase.
struct Bound {
  Cost cost;
  double most;
  std::string formula;
};

class ScaleReport {
 public:
  struct Phase {
    std::string name;
    std::vector<Bound> bounds;
    double virtual_ms = 0;  // the duration of the phase
    double real_ms = 0;
    std::vector<std::optional<Costs>> at_end = {};  // at_end[r] is nullopt if rank r has died
  };

  explicit ScaleReport(int num_ranks) : num_ranks_(num_ranks) {}

  // Appends a phase. Call it in the order of the phases; all costs are 0 at the beginning of the
  // first.
  size_t add(Phase phase);
  Phase& phase(size_t number) { return phases_[number]; }

  // Prints the table to standard output, and returns the number of exceeded bounds.
  int print() const;

 private:
  std::vector<uint64_t> spent(size_t phase, Cost cost) const;

  const int num_ranks_;
  std::vector<Phase> phases_;
};

}  // namespace cadre::testing
