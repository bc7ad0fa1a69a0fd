// Makes the lowered schedule for the arguments of a pipeline.
//
// Threads: pure. Blocking: never. Lifetime: a value. Errors: kInvalidArgument for arguments that do
// not fit each other, of this rank alone: the caller exchanges them before it uses the schedule.
#pragma once

#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/pp/pipeline.h"

namespace cadre::parallel {

// Returns the facts about the schedule of this name. The error lists the names that there are.
Result<PipelineScheduleInfo> schedule_of_name(const std::string& name);

// stages: the stages of this rank.
Result<PipelineSchedule> lowered_schedule(const std::vector<PipelineStage>& stages,
                                          const PipelineOptions& options, int num_ranks);

}  // namespace cadre::parallel
