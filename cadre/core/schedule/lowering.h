// Makes the lowered form of a pipeline schedule, which an executor runs: adds sends and receives,
// and, if wanted, UNSHARD, RESHARD and REDUCE_GRAD.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument for a schedule that is lowered already or cannot be run.
// A lowered schedule runs to its end if receives block and sends do not (they are posted, and the
// message waits at the receiver). Messages are matched by (kind, stage, microbatch).
// Source: the passes of torch.distributed.pipelining in PyTorch 2.13, which give the same results.
#pragma once

#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

enum class ReceivePlacement {
  // The receive is directly before the computation that uses the message. Use it if receives block.
  kBeforeUse,
  // The receive is at the point where its message is sent if all actions take the same time, so
  // that a rank's receives are in the order of its peers' sends. Use it if receives are posted and
  // waited for later.
  kAsSent,
};

struct PipelineLowering {
  ReceivePlacement receives = ReceivePlacement::kBeforeUse;
  // Adds UNSHARD and RESHARD, so that the parameters of at most this many of a rank's next stages
  // are gathered (one more if an overlap needs it). nullopt adds none: the parameters are not
  // sharded then.
  std::optional<int> max_unsharded_stages = {};
  // Adds REDUCE_GRAD after the last B or W of each stage.
  bool reduces_gradients = true;
};

CADRE_EXPORT Result<PipelineSchedule> lower_pipeline(const PipelineSchedule& schedule,
                                                     const PipelineLowering& lowering);

}  // namespace cadre
