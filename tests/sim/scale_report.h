// Reports the costs of each phase of a large job for its processes, next to their bounds.
//
// Threads: one at a time. Blocking: never. Lifetime: a plain value. Errors: none; print() returns
// the number of costs that are above their bounds.
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
  kControlConnections,  // counts both ends of a connection
  kControlMessages,     // without heartbeats
  kControlBytes,        // with heartbeats
  kHeartbeats,
  kDataConnections,  // counts both ends of a connection
  kDataFrames,
  kDataBytes,
};
inline constexpr int kNumCosts = 10;
std::string_view to_string(Cost cost);

// The costs of one process from its start until now.
class Costs {
 public:
  uint64_t& operator[](Cost cost) { return values_[static_cast<size_t>(cost)]; }
  uint64_t operator[](Cost cost) const { return values_[static_cast<size_t>(cost)]; }

 private:
  std::array<uint64_t, kNumCosts> values_{};
};

// An upper bound for a cost, summed over all processes, in one phase.
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
    double virtual_ms = 0;  // the duration of the phase in virtual time
    double real_ms = 0;
    std::vector<std::optional<Costs>> at_end = {};  // at_end[r] is nullopt if rank r was killed
  };

  explicit ScaleReport(int num_ranks) : num_ranks_(num_ranks) {}

  // Appends a phase, in the order in which the phases run. At the beginning of the first phase all
  // costs are 0.
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
