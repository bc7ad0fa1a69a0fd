// What each phase of a large job costs its processes, beside what it may cost at most.
//
// Threads: one at a time. Blocking: never. Lifetime: a plain value. Errors: print() counts the
// figures that are above their bounds.
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
  kControlConnections,  // ends: a connection between two processes counts for both
  kControlMessages,     // without heartbeats
  kControlBytes,        // with them
  kHeartbeats,
  kDataConnections,  // ends
  kDataFrames,
  kDataBytes,
};
inline constexpr int kNumCosts = 10;
std::string_view to_string(Cost cost);

// Costs of one process since it began.
class Costs {
 public:
  uint64_t& operator[](Cost cost) { return values_[static_cast<size_t>(cost)]; }
  uint64_t operator[](Cost cost) const { return values_[static_cast<size_t>(cost)]; }

 private:
  std::array<uint64_t, kNumCosts> values_{};
};

// The most that all processes together may have of a cost in one phase.
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
    double virtual_ms = 0;  // that it took
    double real_ms = 0;
    std::vector<std::optional<Costs>> at_end = {};  // by rank; none of a rank that has died
  };

  explicit ScaleReport(int num_ranks) : num_ranks_(num_ranks) {}

  // Adds the phases in their order; the first begins where all costs are 0.
  size_t add(Phase phase);
  Phase& phase(size_t number) { return phases_[number]; }

  // The table, on standard output. Returns the number of broken bounds.
  int print() const;

 private:
  std::vector<uint64_t> spent(size_t phase, Cost cost) const;

  const int num_ranks_;
  std::vector<Phase> phases_;
};

}  // namespace cadre::testing
