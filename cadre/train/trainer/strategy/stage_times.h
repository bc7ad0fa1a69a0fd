// How long the stages of a pipeline compute, and which of them makes the others wait.
//
// Threads: one. Blocking: of_all_processes(), until all have called it. Errors: as ProcessGroup.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::train {

// Time of one stage for a microbatch: the largest over the processes that have it.
struct StageTime {
  double milliseconds = 0;
  int rank = 0;  // the process with that time
};

// A stage whose time is at least so many times the median of the others is named as slow.
inline constexpr double kSlowStage = 1.5;

// One line: the time of each stage and, if there is one, the slow stage with its rank and what to
// do about it. stages: at least one.
std::string describe(std::span<const StageTime> stages);

class StageTimes {
 public:
  explicit StageTimes(int num_stages) : totals_(static_cast<size_t>(num_stages)) {}

  // Adds the times of one step; zero for the stages of other processes.
  void add(std::span<const Duration> of_step, int64_t num_microbatches);
  // Collective; the same on all processes. Empty before the first step.
  std::vector<StageTime> of_all_processes(const ProcessGroup& world) const;

 private:
  std::vector<Duration> totals_;  // by stage
  int64_t num_microbatches_ = 0;
};

}  // namespace cadre::train
