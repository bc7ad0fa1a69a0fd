#include "cadre/core/schedule/generate.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/one_forward_one_backward.h"
#include "cadre/core/schedule/v_schedules.h"

namespace cadre {
namespace {

constexpr int kNoLimit = std::numeric_limits<int>::max();

// The schedules in the order of PipelineScheduleKind.
constexpr std::array kSchedules{
    PipelineScheduleInfo{PipelineScheduleKind::kGPipe, "gpipe", "GPipe",
                         "all forwards, then all backwards", StagePlacement::kLoop, 1, 1, 1},
    PipelineScheduleInfo{PipelineScheduleKind::k1F1B, "1f1b", "1F1B",
                         "one forward, one backward: GPipe's bubble, fewer live activations",
                         StagePlacement::kLoop, 1, 1, 1},
    PipelineScheduleInfo{PipelineScheduleKind::kInterleaved1F1B, "interleaved-1f1b",
                         "Interleaved1F1B", "1F1B over several stages a rank: a smaller bubble",
                         StagePlacement::kLoop, 1, kNoLimit, 2},
    PipelineScheduleInfo{PipelineScheduleKind::kLoopedBfs, "looped-bfs", "LoopedBFS",
                         "all microbatches through one stage of a rank after the other",
                         StagePlacement::kLoop, 1, kNoLimit, 2},
    PipelineScheduleInfo{PipelineScheduleKind::kZbH1, "zb-h1", "",
                         "1F1B with split backwards: weight gradients fill the bubble",
                         StagePlacement::kLoop, 1, 1, 1},
    PipelineScheduleInfo{PipelineScheduleKind::kInterleavedZeroBubble, "interleaved-zero-bubble",
                         "InterleavedZeroBubble", "ZB-H1 over several stages a rank",
                         StagePlacement::kLoop, 1, kNoLimit, 2},
    PipelineScheduleInfo{PipelineScheduleKind::kZbV, "zb-v", "ZBVZeroBubble",
                         "two stages a rank in a V: no bubble when F, I and W last equally long",
                         StagePlacement::kV, 2, 2, 2},
    PipelineScheduleInfo{PipelineScheduleKind::kDualPipeV, "dualpipe-v", "DualPipeV",
                         "two stages a rank in a V: forwards overlapped with backwards",
                         StagePlacement::kV, 2, 2, 2},
};

// Returns the name in lower case, without '-' and '_'.
std::string plain_name(std::string_view name) {
  std::string plain;
  for (const char c : name) {
    if (c != '-' && c != '_') plain += static_cast<char>(std::tolower(static_cast<uint8_t>(c)));
  }
  return plain;
}

// The parameters from which the actions of each rank are generated.
struct Pipeline {
  PipelineScheduleKind kind;
  int num_ranks;
  int stages_per_rank;
  int num_microbatches;
  // The number of rounds of an interleaved schedule. The microbatches of one round go through all
  // stages of a rank before those of the next round.
  int num_rounds;
};

Error refused(const PipelineScheduleInfo& info, std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", info.name, sentence));
}

Status check_stages_per_rank(const PipelineScheduleInfo& info, int stages_per_rank) {
  if (stages_per_rank >= info.min_stages_per_rank && stages_per_rank <= info.max_stages_per_rank) {
    return {};
  }
  const std::string allowed = info.max_stages_per_rank == kNoLimit
                                  ? cadre::format("at least {}", info.min_stages_per_rank)
                                  : cadre::format("exactly {}", info.min_stages_per_rank);
  return refused(info, cadre::format("each rank has {} stage(s) of the model, not {}", allowed,
                                     stages_per_rank));
}

Status check_pipeline_size(const PipelineScheduleInfo& info, const Pipeline& pipeline) {
  CADRE_RETURN_IF_ERROR(check_stages_per_rank(info, pipeline.stages_per_rank));
  if (pipeline.num_ranks < 1 || pipeline.num_microbatches < 1) {
    return refused(
        info, cadre::format("{} ranks and {} microbatches; a schedule needs at least one of each",
                            pipeline.num_ranks, pipeline.num_microbatches));
  }
  const int64_t num_stages = int64_t{pipeline.num_ranks} * pipeline.stages_per_rank;
  if (num_stages > kMaxPipelineStages ||
      num_stages > kMaxPipelineComputations / pipeline.num_microbatches) {
    return refused(info, cadre::format("{} stages and {} microbatches; at most {} stages and {} "
                                       "pairs of a stage and a microbatch",
                                       num_stages, pipeline.num_microbatches, kMaxPipelineStages,
                                       kMaxPipelineComputations));
  }
  const bool takes_turns = pipeline.kind == PipelineScheduleKind::kInterleaved1F1B ||
                           pipeline.kind == PipelineScheduleKind::kInterleavedZeroBubble;
  if (takes_turns && pipeline.num_microbatches % pipeline.num_rounds != 0) {
    return refused(
        info, cadre::format("{0} microbatches on {1} ranks make {2} rounds ({0} / {1}, rounded "
                            "down), and {0} is not a multiple of {2}; take {3} or {4} microbatches",
                            pipeline.num_microbatches, pipeline.num_ranks, pipeline.num_rounds,
                            pipeline.num_rounds * pipeline.num_ranks,
                            (pipeline.num_rounds + 1) * pipeline.num_ranks));
  }
  if (pipeline.kind == PipelineScheduleKind::kDualPipeV && pipeline.num_microbatches < num_stages) {
    return refused(info, cadre::format("{} microbatches for {} stages ({} ranks with 2 each); it "
                                       "needs at least as many microbatches as stages",
                                       pipeline.num_microbatches, num_stages, pipeline.num_ranks));
  }
  return {};
}

std::vector<PipelineAction> gpipe_order(int rank, const Pipeline& pipeline) {
  std::vector<PipelineAction> actions;
  for (const auto kind : {PipelineActionKind::kForward, PipelineActionKind::kBackward}) {
    for (int i = 0; i < pipeline.num_microbatches; ++i) {
      actions.push_back({.kind = kind, .stage = rank, .microbatch = i});
    }
  }
  return actions;
}

// Returns the order of breadth-first pipelining: all microbatches go through one stage of the rank
// after the other. The backwards run in the reverse order of the forwards.
std::vector<PipelineAction> looped_bfs_order(int rank, const Pipeline& pipeline) {
  std::vector<PipelineAction> actions;
  for (int pass = 0; pass < pipeline.stages_per_rank; ++pass) {
    for (int i = 0; i < pipeline.num_microbatches; ++i) {
      actions.push_back({.kind = PipelineActionKind::kForward,
                         .stage = pass * pipeline.num_ranks + rank,
                         .microbatch = i});
    }
  }
  for (size_t i = actions.size(); i-- > 0;) {
    actions.push_back({.kind = PipelineActionKind::kBackward,
                       .stage = actions[i].stage,
                       .microbatch = actions[i].microbatch});
  }
  return actions;
}

std::vector<PipelineAction> order_of_rank(int rank, const Pipeline& pipeline) {
  const VPipeline v_pipeline{rank, pipeline.num_ranks, pipeline.num_microbatches};
  OneForwardOneBackward turns{.rank = rank,
                              .num_ranks = pipeline.num_ranks,
                              .stages_per_rank = pipeline.stages_per_rank,
                              .num_microbatches = pipeline.num_microbatches};
  switch (pipeline.kind) {
    case PipelineScheduleKind::kGPipe:
      return gpipe_order(rank, pipeline);
    case PipelineScheduleKind::kLoopedBfs:
      return looped_bfs_order(rank, pipeline);
    case PipelineScheduleKind::kZbV:
      return zb_v_order(v_pipeline);
    case PipelineScheduleKind::kDualPipeV:
      return dualpipe_v_order(v_pipeline);
    case PipelineScheduleKind::k1F1B:
      break;
    case PipelineScheduleKind::kInterleaved1F1B:
      turns.microbatches_per_turn = pipeline.num_microbatches / pipeline.num_rounds;
      turns.warmup_per_hop = 2;
      break;
    case PipelineScheduleKind::kInterleavedZeroBubble:
      turns.microbatches_per_turn = pipeline.num_microbatches / pipeline.num_rounds;
      turns.weight_grad_delay = rank;
      break;
    case PipelineScheduleKind::kZbH1:
      turns.weight_grad_delay = rank;
      break;
  }
  return one_forward_one_backward_order(turns);
}

}  // namespace

std::span<const PipelineScheduleInfo> pipeline_schedules() {
  return kSchedules;
}

const PipelineScheduleInfo& info_of(PipelineScheduleKind kind) {
  return kSchedules[static_cast<size_t>(kind)];
}

const PipelineScheduleInfo* find_pipeline_schedule(std::string_view name) {
  const std::string wanted = plain_name(name);
  const auto found = std::ranges::find_if(kSchedules, [&](const PipelineScheduleInfo& info) {
    return plain_name(info.name) == wanted ||
           (!info.pytorch_name.empty() && plain_name(info.pytorch_name) == wanted);
  });
  return found == kSchedules.end() ? nullptr : &*found;
}

Result<PipelineSchedule> make_pipeline_schedule(const PipelineScheduleOptions& options) {
  const PipelineScheduleInfo& info = info_of(options.kind);
  const Pipeline pipeline{
      .kind = options.kind,
      .num_ranks = options.num_ranks,
      .stages_per_rank = options.stages_per_rank.value_or(info.usual_stages_per_rank),
      .num_microbatches = options.num_microbatches,
      .num_rounds = std::max(1, options.num_microbatches / std::max(1, options.num_ranks))};
  CADRE_RETURN_IF_ERROR(check_pipeline_size(info, pipeline));
  PipelineSchedule schedule{
      .ranks = {},
      .rank_of_stage = place_stages(info.placement, {pipeline.num_ranks, pipeline.stages_per_rank}),
      .num_microbatches = options.num_microbatches};
  for (int rank = 0; rank < pipeline.num_ranks; ++rank) {
    schedule.ranks.push_back(order_of_rank(rank, pipeline));
  }
  return schedule;
}

}  // namespace cadre
