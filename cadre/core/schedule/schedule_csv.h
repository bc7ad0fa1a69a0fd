// Pipeline schedules as CSV, in the form that torch.distributed.pipelining writes and reads: a line
// for each rank, an action in each cell.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument with line and column for text that is no schedule. A well-formed
// schedule may be impossible to run: check_pipeline() checks that. Source: the CSV of
// torch.distributed.pipelining in PyTorch 2.13 (docs/formats/pipeline-schedule.md).
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

// The limit on the size of the text; larger texts are an error.
inline constexpr size_t kMaxPipelineCsvBytes = size_t{64} << 20;

// Returns CSV with the line ends of Python's csv module, "\r\n".
CADRE_EXPORT std::string to_csv(const PipelineSchedule& schedule);

// Skips empty cells, which mean in PyTorch that a rank is idle: the order of the actions determines
// when they run. Takes the rank of each stage and the number of microbatches from the actions.
CADRE_EXPORT Result<PipelineSchedule> parse_pipeline_csv(std::string_view text);

}  // namespace cadre
