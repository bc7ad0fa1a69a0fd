// Generates pipeline schedules by their names, each with a pure function.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument with the numbers, for options that the schedule does not support.
// Source: GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream, 1806.03377, as Megatron-LM
// flushes it), interleaved 1F1B (2104.04473), breadth-first (2211.05953), zero bubble ZB-H1 and
// ZB-V (2401.10241), DualPipe (2412.19437) in the form for V placement. Where PyTorch 2.13 has the
// schedule, the order of every rank equals PyTorch's (tests/parity/schedules_test.py).
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

enum class PipelineScheduleKind {
  kGPipe,
  k1F1B,
  kInterleaved1F1B,
  kLoopedBfs,
  kZbH1,
  kInterleavedZeroBubble,
  kZbV,
  kDualPipeV,
};

struct PipelineScheduleInfo {
  PipelineScheduleKind kind;
  std::string_view name;  // "interleaved-1f1b"
  // The name for get_schedule_class(). It is empty if PyTorch has no such schedule.
  std::string_view pytorch_name;
  std::string_view summary;
  StagePlacement placement;
  int min_stages_per_rank;
  int max_stages_per_rank;
  int usual_stages_per_rank;
};

// Returns all schedules, simple ones first.
CADRE_EXPORT std::span<const PipelineScheduleInfo> pipeline_schedules();

CADRE_EXPORT const PipelineScheduleInfo& info_of(PipelineScheduleKind kind);

// Finds a schedule by either name; ignores case, '-' and '_'. Returns nullptr if there is none.
CADRE_EXPORT const PipelineScheduleInfo* find_pipeline_schedule(std::string_view name);

struct PipelineScheduleOptions {
  PipelineScheduleKind kind = PipelineScheduleKind::k1F1B;
  int num_ranks = 1;
  int num_microbatches = 1;
  std::optional<int> stages_per_rank = {};  // nullopt means usual_stages_per_rank
};

// The largest number of pairs of a stage and a microbatch. More are an error, because the numbers
// are probably typing errors.
inline constexpr int64_t kMaxPipelineComputations = int64_t{1} << 24;

// Returns the schedule in the compute-only form.
CADRE_EXPORT Result<PipelineSchedule> make_pipeline_schedule(
    const PipelineScheduleOptions& options);

}  // namespace cadre
