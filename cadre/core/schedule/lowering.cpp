#include "cadre/core/schedule/lowering.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/schedule_walk.h"

namespace cadre {
namespace {

using Actions = std::vector<PipelineAction>;
using Kind = PipelineActionKind;

PipelineAction action_of_stage(Kind kind, int stage) {
  return {.kind = kind, .stage = stage};
}

// Returns for each step the stages that the rank needs next, the soonest first: at most `count`, or
// one more if an overlap needs two at once.
std::vector<std::vector<int>> next_stages(const Actions& actions, int count) {
  std::vector<std::vector<int>> stages_at(actions.size());
  std::vector<int> by_next_use;
  std::map<int, size_t> next_use;
  for (size_t step = actions.size(); step-- > 0;) {
    const auto leaves = leaves_of(actions[step]);
    for (auto leaf = leaves.rbegin(); leaf != leaves.rend(); ++leaf) {
      std::erase(by_next_use, leaf->stage);
      by_next_use.insert(by_next_use.begin(), leaf->stage);
      next_use[leaf->stage] = step;
    }
    size_t num_taken = std::min<size_t>(count, by_next_use.size());
    if (num_taken < by_next_use.size() &&
        next_use[by_next_use[num_taken]] == next_use[by_next_use[num_taken - 1]]) {
      ++num_taken;
    }
    stages_at[step].assign(by_next_use.begin(), by_next_use.begin() + num_taken);
  }
  return stages_at;
}

Actions with_unshards(const Actions& actions, int max_unsharded_stages) {
  const auto stages_at = next_stages(actions, max_unsharded_stages);
  std::set<int> unsharded;
  Actions result;
  for (size_t step = 0; step < actions.size(); ++step) {
    std::erase_if(unsharded, [&](int stage) {
      const bool is_needed = std::ranges::count(stages_at[step], stage) > 0;
      if (!is_needed) result.push_back(action_of_stage(Kind::kReshard, stage));
      return !is_needed;
    });
    for (const int stage : stages_at[step]) {
      if (unsharded.insert(stage).second) result.push_back(action_of_stage(Kind::kUnshard, stage));
    }
    result.push_back(actions[step]);
  }
  for (const int stage : unsharded) result.push_back(action_of_stage(Kind::kReshard, stage));
  return result;
}

Actions with_reductions(const Actions& actions, int num_microbatches) {
  std::map<int, int> num_gradients;  // the number of gradients; the key is the stage
  Actions result;
  for (const PipelineAction& action : actions) {
    result.push_back(action);
    for (const PipelineAction& leaf : leaves_of(action)) {
      if (leaf.kind != Kind::kBackward && leaf.kind != Kind::kWeightGrad) continue;
      if (++num_gradients[leaf.stage] == num_microbatches) {
        result.push_back(action_of_stage(Kind::kReduceGrad, leaf.stage));
      }
    }
  }
  return result;
}

// Returns the send and the receive for the result of a computation, if another rank needs it.
std::optional<std::pair<PipelineAction, PipelineAction>> message_of(
    const PipelineSchedule& schedule, const PipelineAction& leaf) {
  const bool is_forward = leaf.kind == Kind::kForward;
  if (!is_forward && leaf.kind != Kind::kBackward && leaf.kind != Kind::kInputGrad) return {};
  const int to = is_forward ? leaf.stage + 1 : leaf.stage - 1;
  if (to < 0 || to >= schedule.num_stages() ||
      schedule.rank_of_stage[to] == schedule.rank_of_stage[leaf.stage]) {
    return {};
  }
  return std::pair{PipelineAction{.kind = is_forward ? Kind::kSendForward : Kind::kSendBackward,
                                  .stage = leaf.stage,
                                  .microbatch = leaf.microbatch},
                   PipelineAction{.kind = is_forward ? Kind::kRecvForward : Kind::kRecvBackward,
                                  .stage = to,
                                  .microbatch = leaf.microbatch}};
}

// Puts each send directly behind its computation, and each receive at the time at which its message
// is sent.
Result<PipelineSchedule> with_messages(const PipelineSchedule& schedule) {
  const auto index = PipelineIndex::make(schedule);
  if (!index.ok()) return index.error();
  PipelineSchedule result{.ranks = std::vector<Actions>(schedule.ranks.size()),
                          .rank_of_stage = schedule.rank_of_stage,
                          .num_microbatches = schedule.num_microbatches};
  CADRE_RETURN_IF_ERROR(walk_pipeline(schedule, *index, [&](const PipelineVisit& visit) {
    Actions& own = result.ranks[visit.position.rank];
    own.push_back(visit.action);
    for (const PipelineAction& leaf : leaves_of(visit.action)) {
      auto message = message_of(schedule, leaf);
      if (!message) continue;
      own.push_back(std::move(message->first));
      const int receiver = schedule.rank_of_stage[message->second.stage];
      result.ranks[receiver].push_back(std::move(message->second));
    }
  }));
  return result;
}

// Moves the receives of a rank to the computations that use them.
Actions with_receives_before_use(const Actions& actions) {
  std::set<std::tuple<Kind, int, int>> receives;
  for (const PipelineAction& action : actions) {
    if (is_message(action.kind)) receives.emplace(action.kind, action.stage, *action.microbatch);
  }
  Actions result;
  for (const PipelineAction& action : actions) {
    if (action.kind == Kind::kRecvForward || action.kind == Kind::kRecvBackward) continue;
    for (const PipelineAction& leaf : leaves_of(action)) {
      if (!is_computation(leaf.kind) || leaf.kind == Kind::kWeightGrad) continue;
      const Kind kind = leaf.kind == Kind::kForward ? Kind::kRecvForward : Kind::kRecvBackward;
      if (receives.contains({kind, leaf.stage, *leaf.microbatch})) {
        result.push_back({.kind = kind, .stage = leaf.stage, .microbatch = leaf.microbatch});
      }
    }
    result.push_back(action);
  }
  return result;
}

Status check_lowering(const PipelineSchedule& schedule, const PipelineLowering& lowering) {
  if (lowering.max_unsharded_stages && *lowering.max_unsharded_stages < 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format(
            "max_unsharded_stages is {}; expected at least 1, the stage on which a rank computes",
            *lowering.max_unsharded_stages));
  }
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const Actions& actions = schedule.ranks[rank];
    const auto found = std::ranges::find_if(actions, [](const PipelineAction& action) {
      return !is_computation(action.kind) && action.kind != Kind::kOverlap;
    });
    if (found == actions.end()) continue;
    const PipelinePosition position{rank, static_cast<size_t>(found - actions.begin())};
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{}: only schedules of F, B, I, W and OVERLAP_F_B can be lowered; "
                               "this one is lowered already",
                               describe(schedule, position)));
  }
  return {};
}

}  // namespace

Result<PipelineSchedule> lower_pipeline(const PipelineSchedule& schedule,
                                        const PipelineLowering& lowering) {
  CADRE_RETURN_IF_ERROR(check_lowering(schedule, lowering));
  PipelineSchedule result = schedule;
  for (Actions& actions : result.ranks) {
    if (lowering.max_unsharded_stages) {
      actions = with_unshards(actions, *lowering.max_unsharded_stages);
    }
    if (lowering.reduces_gradients) actions = with_reductions(actions, schedule.num_microbatches);
  }
  auto lowered = with_messages(result);
  if (!lowered.ok() || lowering.receives == ReceivePlacement::kAsSent) return lowered;
  for (Actions& actions : lowered->ranks) actions = with_receives_before_use(actions);
  return lowered;
}

}  // namespace cadre
