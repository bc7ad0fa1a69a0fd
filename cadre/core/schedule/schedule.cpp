#include "cadre/core/schedule/schedule.h"

#include <algorithm>

namespace cadre {

std::vector<int> place_stages(StagePlacement placement, const PipelineShape& shape) {
  std::vector<int> ranks;
  for (int pass = 0; pass < shape.stages_per_rank; ++pass) {
    const bool goes_back = placement == StagePlacement::kV && pass % 2 == 1;
    for (int i = 0; i < shape.num_ranks; ++i) {
      ranks.push_back(goes_back ? shape.num_ranks - 1 - i : i);
    }
  }
  return ranks;
}

bool has_messages(const PipelineSchedule& schedule) {
  return std::ranges::any_of(schedule.ranks, [](const std::vector<PipelineAction>& actions) {
    return std::ranges::any_of(actions, is_message, &PipelineAction::kind);
  });
}

std::vector<int> peak_live_activations(const PipelineSchedule& schedule) {
  std::vector<int> peaks;
  for (const std::vector<PipelineAction>& actions : schedule.ranks) {
    int live = 0;
    int peak = 0;
    for (const PipelineAction& action : actions) {
      for (const PipelineAction& leaf : leaves_of(action)) {
        if (leaf.kind == PipelineActionKind::kForward) ++live;
        peak = std::max(peak, live);
        if (leaf.kind == PipelineActionKind::kBackward ||
            leaf.kind == PipelineActionKind::kWeightGrad) {
          --live;
        }
      }
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace cadre
