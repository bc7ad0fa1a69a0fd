// The timeline of a pipeline schedule as text: for a terminal, and for programs.
//
// Threads: pure functions. Blocking: never. Errors: none.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/core/schedule/simulate.h"

namespace cadre {

// A line for each time at which an action begins, a column for each rank: the actions that begin,
// "|" while one goes on, "." while the rank waits or has ended.
CADRE_EXPORT std::string timeline_table(const PipelineTimeline& timeline);

// The length of the step, and of each rank its stages, busy time, bubble and live activations.
CADRE_EXPORT std::string timeline_summary(const PipelineSchedule& schedule,
                                          const PipelineTimeline& timeline);

// JSON with the times of every action (docs/formats/pipeline-schedule.md), which
// tools/timeline_svg.py draws. Bytes of the title that are no UTF-8 are replaced.
CADRE_EXPORT std::string timeline_json(const PipelineSchedule& schedule,
                                       const PipelineTimeline& timeline, std::string_view title);

// To the microsecond, without zeros at the end: "1.5".
CADRE_EXPORT std::string milliseconds_text(double ms);

}  // namespace cadre
