#include "cadre/core/schedule/check.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/schedule_walk.h"

namespace cadre {
namespace {

using Kind = PipelineActionKind;

class PipelineChecker {
 public:
  PipelineChecker(const PipelineSchedule& schedule, const PipelineIndex& index)
      : schedule_(schedule), index_(index) {}

  Status check() const {
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int microbatch = 0; microbatch < schedule_.num_microbatches; ++microbatch) {
        CADRE_RETURN_IF_ERROR(check_computations(stage, microbatch));
      }
    }
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      CADRE_RETURN_IF_ERROR(check_sends(rank));
      CADRE_RETURN_IF_ERROR(check_parameters(rank));
    }
    return walk_pipeline(schedule_, index_, [](const PipelineVisit&) {});
  }

 private:
  static Error broken(std::string_view sentence) {
    return Error(ErrorCode::kInvalidArgument, std::string(sentence));
  }
  Error broken(const PipelinePosition& position, std::string_view sentence) const {
    return broken(cadre::format("{}: {}", describe(schedule_, position), sentence));
  }
  bool has(Kind kind, int stage, int microbatch) const {
    return index_.find(kind, stage, microbatch).has_value();
  }

  Status check_computations(int stage, int microbatch) const {
    const bool has_full = has(Kind::kBackward, stage, microbatch);
    const bool has_input = has(Kind::kInputGrad, stage, microbatch);
    const bool has_weight = has(Kind::kWeightGrad, stage, microbatch);
    if (has(Kind::kForward, stage, microbatch) && has_input == has_weight &&
        has_full != has_input) {
      return {};
    }
    std::string found;
    for (const Kind kind : {Kind::kForward, Kind::kBackward, Kind::kInputGrad, Kind::kWeightGrad}) {
      if (!has(kind, stage, microbatch)) continue;
      found += (found.empty() ? "" : " ") +
               to_text({.kind = kind, .stage = stage, .microbatch = microbatch});
    }
    return broken(cadre::format(
        "rank {}: microbatch {} has {} on stage {}; expected {}F{} and "
        "either {}B{} or {}I{} and {}W{}",
        schedule_.rank_of_stage[stage], microbatch, found.empty() ? "nothing" : found, stage, stage,
        microbatch, stage, microbatch, stage, microbatch, stage, microbatch));
  }

  // Checks that each send has a matching receive. walk_pipeline() checks the reverse.
  Status check_sends(int rank) const {
    for (size_t step = 0; step < schedule_.ranks[rank].size(); ++step) {
      const PipelineAction& action = schedule_.ranks[rank][step];
      const bool is_forward = action.kind == Kind::kSendForward;
      if (!is_forward && action.kind != Kind::kSendBackward) continue;
      const int to = is_forward ? action.stage + 1 : action.stage - 1;
      if (to < 0 || to >= schedule_.num_stages()) {
        return broken({rank, step}, cadre::format("there is no stage {} to send to", to));
      }
      const PipelineAction receive{.kind = is_forward ? Kind::kRecvForward : Kind::kRecvBackward,
                                   .stage = to,
                                   .microbatch = action.microbatch};
      const int peer = schedule_.rank_of_stage[to];
      if (peer == rank) {
        return broken({rank, step},
                      cadre::format("stage {} is on the same rank; there is nothing to send", to));
      }
      if (!has(receive.kind, to, *action.microbatch)) {
        return broken({rank, step}, cadre::format("rank {} has no {}", peer, to_text(receive)));
      }
    }
    return {};
  }

  // Checks the order of UNSHARD, computations and RESHARD, and of gradients and REDUCE_GRAD.
  Status check_parameters(int rank) const {
    std::set<int> sharded_by_plan;  // the stages that the rank gathers at some point
    std::unordered_map<int, int> num_gradients;
    std::set<int> reduced;
    const auto& actions = schedule_.ranks[rank];
    for (const PipelineAction& action : actions) {
      if (action.kind == Kind::kUnshard) sharded_by_plan.insert(action.stage);
    }
    std::set<int> unsharded;
    for (size_t step = 0; step < actions.size(); ++step) {
      for (const PipelineAction& leaf : leaves_of(actions[step])) {
        const PipelinePosition at{rank, step};
        if (leaf.kind == Kind::kUnshard && !unsharded.insert(leaf.stage).second) {
          return broken(at, cadre::format("stage {} is unsharded already", leaf.stage));
        }
        if (leaf.kind == Kind::kReshard && unsharded.erase(leaf.stage) == 0) {
          return broken(at, cadre::format("stage {} is not unsharded", leaf.stage));
        }
        if (leaf.kind == Kind::kReduceGrad) {
          const int gradients = num_gradients[leaf.stage];
          if (gradients != schedule_.num_microbatches || !reduced.insert(leaf.stage).second) {
            return broken(at, cadre::format("{} of {} microbatches have their gradients here; "
                                            "gradients are reduced once, after the last microbatch",
                                            gradients, schedule_.num_microbatches));
          }
        }
        if (!is_computation(leaf.kind)) continue;
        if (sharded_by_plan.contains(leaf.stage) && !unsharded.contains(leaf.stage)) {
          return broken(at, cadre::format("stage {} is not unsharded here", leaf.stage));
        }
        if (leaf.kind == Kind::kBackward || leaf.kind == Kind::kWeightGrad) {
          ++num_gradients[leaf.stage];
        }
      }
    }
    return {};
  }

  const PipelineSchedule& schedule_;
  const PipelineIndex& index_;
};

Status check_counts(const PipelineSchedule& schedule) {
  if (schedule.ranks.empty() || schedule.rank_of_stage.empty() || schedule.num_microbatches < 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("the schedule has {} ranks, {} stages and {} microbatches; it needs "
                      "at least one of each",
                      schedule.num_ranks(), schedule.num_stages(), schedule.num_microbatches));
  }
  const auto idle =
      std::ranges::find_if(schedule.ranks, [](const auto& actions) { return actions.empty(); });
  if (idle == schedule.ranks.end()) return {};
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("rank {} has no actions; every rank needs at least one stage",
                             idle - schedule.ranks.begin()));
}

}  // namespace

Status check_pipeline(const PipelineSchedule& schedule, const PipelineLimits& limits) {
  CADRE_RETURN_IF_ERROR(check_counts(schedule));
  const auto index = PipelineIndex::make(schedule);
  if (!index.ok()) return index.error();
  CADRE_RETURN_IF_ERROR(PipelineChecker(schedule, *index).check());
  if (!limits.max_live_activations) return {};
  const std::vector<int> peaks = peak_live_activations(schedule);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    if (peaks[rank] > *limits.max_live_activations) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("rank {} keeps the activations of up to {} microbatches; at most "
                                 "{} are allowed",
                                 rank, peaks[rank], *limits.max_live_activations));
    }
  }
  return {};
}

}  // namespace cadre
