// Makes the lowered schedule for the arguments of a pipeline.
//
// Errors: kInvalidArgument for arguments that do not fit each other. The function checks this
// rank's arguments only; the caller must exchange the error before it uses the schedule.
#pragma once

#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/pp/pipeline.h"

namespace cadre::parallel {

// Returns the properties of the schedule with this name. The error for an unknown name lists the
// valid names.
Result<PipelineScheduleInfo> schedule_of_name(const std::string& name);

// `stages` are the stages of this rank.
Result<PipelineSchedule> lowered_schedule(const std::vector<PipelineStage>& stages,
                                          const PipelineOptions& options, int num_ranks);

}  // namespace cadre::parallel
