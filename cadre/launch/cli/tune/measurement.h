// Measures collectives with each of their two algorithms, and makes a tuning file of the result.
//
// Threads: one. Blocking: as long as it measures. Errors: throws the Error of the groups. All ranks
// of the groups call measure().
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/collective/net/tuning_file.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/launch/cli/tune/crossing.h"

namespace cadre::cli {

struct MeasureOptions {
  std::vector<uint64_t> sizes;  // ascending
  int repetitions = 15;         // fewer for sizes that take long
};

// Three groups of the same ranks. `first` uses the first algorithm of each operation for all
// sizes, `second` the second one. `world` combines the times of the ranks.
struct TunedGroups {
  Communicator& world;
  Communicator& first;
  Communicator& second;
};

// Returns the text of a tuning file with which each operation uses its first algorithm, or its
// second one, for all sizes that measure() accepts.
std::string tuning_of_first();
std::string tuning_of_second();

// The result for one operation.
struct MeasuredOperation {
  OpKind kind = OpKind::kAllReduce;
  std::string_view first;   // the name of the first algorithm
  std::string_view second;  // the name of the second algorithm
  // Why these groups have no choice between the algorithms; then there are no times.
  std::string obstacle = {};
  std::vector<TimedSize> times = {};
  uint64_t crossing = 0;    // the size from which these groups use the second algorithm
  bool is_default = false;  // the times are equal, or there are none
};

// Returns the result, which is equal on all ranks. Each repetition runs the operation with the
// first and then with the second algorithm. A time is the median over the repetitions of the
// maximum over the ranks. `on_progress` is called before each operation is measured.
std::vector<MeasuredOperation> measure(
    const TunedGroups& groups, const MeasureOptions& options,
    const std::function<void(const MeasuredOperation& next)>& on_progress);

// Returns the number of nodes among which reductions and broadcasts choose their algorithms: hosts
// with the engine "hierarchical", else ranks.
int num_nodes_of(const TunedGroups& groups);

// Returns the table of sizes, from the result on groups of `num_nodes` nodes. It has the default
// sizes of operations that have no choice.
CrossoverTable table_of(const std::vector<MeasuredOperation>& results, int num_nodes);

// Returns the table of sizes, times and choices, for people.
std::string text_of(const std::vector<MeasuredOperation>& results);

}  // namespace cadre::cli
