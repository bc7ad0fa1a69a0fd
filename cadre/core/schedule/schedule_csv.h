// Pipeline schedules as CSV, as torch.distributed.pipelining writes and reads them: a line for each
// rank, an action in each cell.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument with line and column for text that is no schedule. What is well-formed
// may still be impossible to run: check_pipeline() tells. Source: the CSV of
// torch.distributed.pipelining in PyTorch 2.13 (docs/formats/pipeline-schedule.md).
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

// Larger texts are refused.
inline constexpr size_t kMaxPipelineCsvBytes = size_t{64} << 20;

// With the line ends of Python's csv module, "\r\n".
CADRE_EXPORT std::string to_csv(const PipelineSchedule& schedule);

// Empty cells, in which PyTorch draws a rank as idle, are skipped: when an action runs follows from
// the order. The rank of each stage and the number of microbatches are taken from the actions.
CADRE_EXPORT Result<PipelineSchedule> parse_pipeline_csv(std::string_view text);

}  // namespace cadre
