// The timeline of a pipeline schedule as an SVG picture.
//
// Threads: pure functions. Blocking: never. Errors: none.
// A row for each rank, a box for each computation with the number of its microbatch; the colour
// tells its kind, a lighter one a later stage of the rank. Browsers show action and times under the
// pointer.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/core/schedule/simulate.h"

namespace cadre {

CADRE_EXPORT std::string timeline_svg(const PipelineSchedule& schedule,
                                      const PipelineTimeline& timeline, std::string_view title);

}  // namespace cadre
