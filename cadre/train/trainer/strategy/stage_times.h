// Measures how long each stage of a pipeline computes, and finds a straggler.
//
// Threads: one. Blocking: of_all_processes() is collective. Errors: as ProcessGroup.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::train {

// The time that one stage takes for a microbatch: the maximum over the processes that have the
// stage.
struct StageTime {
  double milliseconds = 0;
  int rank = 0;  // the process with the maximum
};

// A stage is reported as slow if its time is at least this factor times the median of the others.
inline constexpr double kSlowStage = 1.5;

// Returns one line with the time of each stage and, if there is a slow stage, its rank and what to
// do. `stages` must not be empty.
std::string describe(std::span<const StageTime> stages);

class StageTimes {
 public:
  explicit StageTimes(int num_stages) : totals_(static_cast<size_t>(num_stages)) {}

  // Adds the times of one step; they must be zero for stages of other processes.
  void add(std::span<const Duration> of_step, int64_t num_microbatches);
  // Collective. Returns the same on all processes; an empty list before the first step.
  std::vector<StageTime> of_all_processes(const ProcessGroup& world) const;

 private:
  std::vector<Duration> totals_;  // one total for each stage
  int64_t num_microbatches_ = 0;
};

}  // namespace cadre::train
