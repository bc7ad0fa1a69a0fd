// Makes the lowered form of a pipeline schedule, which an executor runs: with sends and receives,
// and where wanted UNSHARD, RESHARD and REDUCE_GRAD.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument for a schedule that is lowered already or cannot be run.
// A lowered schedule runs to its end when receives block and sends do not (they are posted, and the
// message waits at the receiver), messages being matched by (kind, stage, microbatch).
// Source: the passes of torch.distributed.pipelining in PyTorch 2.13, whose results these equal.
#pragma once

#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

enum class ReceivePlacement {
  // Right before the computation that uses the message: for receives that block.
  kBeforeUse,
  // Where the message has been sent when all actions last equally long, so that the receives of a
  // rank have one order with its peers' sends: for receives that are posted and waited for later.
  kAsSent,
};

struct PipelineLowering {
  ReceivePlacement receives = ReceivePlacement::kBeforeUse;
  // UNSHARD and RESHARD, so that the parameters of the next so many stages of a rank are gathered
  // (of one more, where an overlap needs it). Absent: none, parameters are whole.
  std::optional<int> max_unsharded_stages = {};
  // REDUCE_GRAD after the last B or W of each stage.
  bool reduces_gradients = true;
};

CADRE_EXPORT Result<PipelineSchedule> lower_pipeline(const PipelineSchedule& schedule,
                                                     const PipelineLowering& lowering);

}  // namespace cadre
