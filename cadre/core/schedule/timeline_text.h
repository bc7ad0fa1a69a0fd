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

// Returns a table with a line for each time at which an action begins, and a column for each rank.
// A cell has the actions that begin, "|" while an action continues, or "." while the rank waits or
// has ended.
CADRE_EXPORT std::string timeline_table(const PipelineTimeline& timeline);

// Returns the length of the step, and for each rank its stages, busy time, bubble and live
// activations.
CADRE_EXPORT std::string timeline_summary(const PipelineSchedule& schedule,
                                          const PipelineTimeline& timeline);

// Returns JSON with the times of every action (docs/formats/pipeline-schedule.md), which
// tools/timeline_svg.py draws. Bytes of the title that are not UTF-8 are replaced.
CADRE_EXPORT std::string timeline_json(const PipelineSchedule& schedule,
                                       const PipelineTimeline& timeline, std::string_view title);

// Returns the time to the microsecond, without zeros at the end, for example "1.5".
CADRE_EXPORT std::string milliseconds_text(double ms);

}  // namespace cadre
