// Enumerates the pipelines with which pipeline schedules are tested: every schedule on 2 to 8 ranks
// with 1 to 16 microbatches and 1 to 4 stages on each rank.
#pragma once

#include <functional>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"

namespace cadre {

inline std::string text_of(const PipelineScheduleOptions& options) {
  return cadre::format("{} ranks={} microbatches={} stages_per_rank={}", info_of(options.kind).name,
                       options.num_ranks, options.num_microbatches,
                       options.stages_per_rank.value_or(0));
}

// Calls `body` with each pipeline that the schedule supports. Returns the number of these
// pipelines.
inline int for_each_pipeline(
    const std::function<void(const PipelineScheduleOptions&, const PipelineSchedule&)>& body) {
  int count = 0;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    for (int num_ranks = 2; num_ranks <= 8; ++num_ranks) {
      for (int num_microbatches = 1; num_microbatches <= 16; ++num_microbatches) {
        for (int stages_per_rank = 1; stages_per_rank <= 4; ++stages_per_rank) {
          const PipelineScheduleOptions options{info.kind, num_ranks, num_microbatches,
                                                stages_per_rank};
          const auto schedule = make_pipeline_schedule(options);
          if (!schedule.ok()) continue;
          body(options, *schedule);
          ++count;
        }
      }
    }
  }
  return count;
}

// Returns a schedule of this kind. REQUIRES: the kind supports these numbers of ranks and
// microbatches.
inline PipelineSchedule make(PipelineScheduleKind kind, int num_ranks, int num_microbatches) {
  return make_pipeline_schedule(
             {.kind = kind, .num_ranks = num_ranks, .num_microbatches = num_microbatches})
      .value_or_throw();
}

}  // namespace cadre
