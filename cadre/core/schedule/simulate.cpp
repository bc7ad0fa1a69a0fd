#include "cadre/core/schedule/simulate.h"

#include <algorithm>
#include <cmath>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/schedule_walk.h"

namespace cadre {
namespace {

Status check_costs(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  const auto num_given = costs.stages.size();
  if (num_given != 1 && num_given != static_cast<size_t>(schedule.num_stages())) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("times are given for {} stages, but the schedule has {}; give times "
                               "for every stage, or one time for all of them",
                               num_given, schedule.num_stages()));
  }
  const auto is_time = [](double ms) { return std::isfinite(ms) && ms >= 0; };
  for (size_t i = 0; i < num_given; ++i) {
    const StageCosts& stage = costs.stages[i];
    if (!is_time(stage.forward_ms) || !is_time(stage.backward_ms) ||
        !is_time(stage.input_grad_ms) || !is_time(stage.weight_grad_ms) ||
        stage.forward_ms + stage.backward_ms + stage.input_grad_ms + stage.weight_grad_ms <= 0) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("stage {} takes {} ms forward, {} backward, {} for the input's gradient, "
                        "{} for the weights'; times must be at least 0, and one of them above 0",
                        i, stage.forward_ms, stage.backward_ms, stage.input_grad_ms,
                        stage.weight_grad_ms));
    }
  }
  if (!is_time(costs.message_ms) || !(costs.overlap_share >= 0 && costs.overlap_share <= 1)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("a message takes {} ms and {} of an overlap is hidden; expected a "
                               "time, and a share from 0 to 1",
                               costs.message_ms, costs.overlap_share));
  }
  return {};
}

double duration_of_leaf(const PipelineAction& leaf, const PipelineCosts& costs) {
  const StageCosts& stage = costs.stages.size() == 1 ? costs.stages[0] : costs.stages[leaf.stage];
  switch (leaf.kind) {
    case PipelineActionKind::kForward:
      return stage.forward_ms;
    case PipelineActionKind::kBackward:
      return stage.backward_ms;
    case PipelineActionKind::kInputGrad:
      return stage.input_grad_ms;
    case PipelineActionKind::kWeightGrad:
      return stage.weight_grad_ms;
    default:
      return 0;
  }
}

double duration_of(const PipelineAction& action, const PipelineCosts& costs) {
  if (action.kind != PipelineActionKind::kOverlap) return duration_of_leaf(action, costs);
  const double first = duration_of_leaf(action.parts[0], costs);
  const double second = duration_of_leaf(action.parts[1], costs);
  return first + second - costs.overlap_share * std::min(first, second);
}

}  // namespace

Result<PipelineTimeline> simulate_pipeline(const PipelineSchedule& schedule,
                                           const PipelineCosts& costs) {
  CADRE_RETURN_IF_ERROR(check_costs(schedule, costs));
  const auto index = PipelineIndex::make(schedule);
  if (!index.ok()) return index.error();
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  PipelineTimeline timeline{.ranks = std::vector<std::vector<TimedAction>>(num_ranks),
                            .busy_ms = std::vector<double>(num_ranks, 0),
                            .peak_live_activations = peak_live_activations(schedule)};
  CADRE_RETURN_IF_ERROR(walk_pipeline(schedule, *index, [&](const PipelineVisit& visit) {
    const int rank = visit.position.rank;
    std::vector<TimedAction>& own = timeline.ranks[rank];
    const double free_ms = own.empty() ? 0 : own.back().end_ms;
    double ready_ms = free_ms;
    for (const PipelinePosition& need : visit.needs) {
      const double there_ms =
          timeline.ranks[need.rank][need.step].end_ms + (need.rank == rank ? 0 : costs.message_ms);
      ready_ms = std::max(ready_ms, there_ms);
    }
    const bool waits_itself = is_message(visit.action.kind);
    const double duration_ms = duration_of(visit.action, costs);
    own.push_back({.action = visit.action,
                   .begin_ms = waits_itself ? free_ms : ready_ms,
                   .end_ms = ready_ms + duration_ms});
    timeline.busy_ms[rank] += duration_ms;
    timeline.makespan_ms = std::max(timeline.makespan_ms, own.back().end_ms);
  }));
  return timeline;
}

}  // namespace cadre
