#include "cadre/core/schedule/schedule_walk.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

using Kind = PipelineActionKind;

constexpr size_t kMaxReportedRanks = 8;

// Packs an action into 64 bits, which suffice: see kMaxPipelineStages and kMaxPipelineMicrobatches.
uint64_t key_of(Kind kind, int stage, int microbatch) {
  return static_cast<uint64_t>(kind) << 56 | static_cast<uint64_t>(stage) << 32 |
         static_cast<uint64_t>(microbatch);
}

Error misplaced(const PipelineSchedule& schedule, const PipelinePosition& position,
                std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{}: {}", describe(schedule, position), sentence));
}

Status check_leaf(const PipelineSchedule& schedule, const PipelinePosition& position,
                  const PipelineAction& leaf) {
  if (leaf.stage < 0 || leaf.stage >= schedule.num_stages()) {
    return misplaced(schedule, position,
                     cadre::format("there is no stage {}; the schedule has {}", leaf.stage,
                                   schedule.num_stages()));
  }
  if (schedule.rank_of_stage[leaf.stage] != position.rank) {
    return misplaced(schedule, position,
                     cadre::format("stage {} belongs to rank {}", leaf.stage,
                                   schedule.rank_of_stage[leaf.stage]));
  }
  if (leaf.microbatch.has_value() != has_microbatch(leaf.kind)) {
    return misplaced(schedule, position,
                     cadre::format("{} {}", to_string(leaf.kind),
                                   leaf.microbatch ? "concerns all microbatches, not one"
                                                   : "needs the number of a microbatch"));
  }
  if (leaf.microbatch && (*leaf.microbatch < 0 || *leaf.microbatch >= schedule.num_microbatches)) {
    return misplaced(schedule, position,
                     cadre::format("there is no microbatch {}; the schedule has {}",
                                   *leaf.microbatch, schedule.num_microbatches));
  }
  return {};
}

Status check_parts(const PipelineSchedule& schedule, const PipelinePosition& position,
                   const PipelineAction& action) {
  const bool is_pair =
      action.parts.size() == 2 && action.parts[0].kind == Kind::kForward &&
      (action.parts[1].kind == Kind::kBackward || action.parts[1].kind == Kind::kInputGrad);
  if (action.kind == Kind::kOverlap ? is_pair : action.parts.empty()) return {};
  return misplaced(schedule, position,
                   cadre::format("has {} parts; an overlap has two, a forward and a backward, "
                                 "and other actions have none",
                                 action.parts.size()));
}

// Returns the first of the needed actions that has not run yet.
PipelinePosition first_unmet(std::span<const PipelinePosition> needs,
                             std::span<const size_t> next_steps) {
  return *std::ranges::find_if(
      needs, [&](const PipelinePosition& need) { return next_steps[need.rank] <= need.step; });
}

bool is_ready(std::span<const PipelinePosition> needs, std::span<const size_t> next_steps) {
  return std::ranges::all_of(
      needs, [&](const PipelinePosition& need) { return next_steps[need.rank] > need.step; });
}

Error deadlock(const PipelineSchedule& schedule, const PipelineIndex& index,
               std::span<const size_t> next_steps) {
  std::string text;
  size_t num_stuck = 0;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    if (next_steps[rank] == schedule.ranks[rank].size()) continue;
    if (++num_stuck > kMaxReportedRanks) continue;
    const PipelinePosition at{rank, next_steps[rank]};
    const auto needs = index.needs_of(schedule, schedule.ranks[rank][at.step]);
    text += cadre::format("{}{} needs {}", text.empty() ? "" : "; ", describe(schedule, at),
                          describe(schedule, first_unmet(*needs, next_steps)));
  }
  if (num_stuck > kMaxReportedRanks) {
    text += cadre::format("; and {} more ranks wait", num_stuck - kMaxReportedRanks);
  }
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("deadlock: each of these actions comes before an action that it needs: {}",
                    text));
}

}  // namespace

std::string describe(const PipelineSchedule& schedule, const PipelinePosition& position) {
  return cadre::format("rank {}, step {} ({})", position.rank, position.step,
                       to_text(schedule.ranks[position.rank][position.step]));
}

Result<PipelineIndex> PipelineIndex::make(const PipelineSchedule& schedule) {
  PipelineIndex index;
  index.has_messages_ = has_messages(schedule);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (size_t step = 0; step < schedule.ranks[rank].size(); ++step) {
      const PipelineAction& action = schedule.ranks[rank][step];
      const PipelinePosition position{rank, step};
      CADRE_RETURN_IF_ERROR(check_parts(schedule, position, action));
      for (const PipelineAction& leaf : leaves_of(action)) {
        CADRE_RETURN_IF_ERROR(check_leaf(schedule, position, leaf));
        if (!leaf.microbatch) continue;
        const auto [other, is_first] =
            index.positions_.try_emplace(key_of(leaf.kind, leaf.stage, *leaf.microbatch), position);
        if (!is_first) {
          return misplaced(schedule, position,
                           cadre::format("{} occurs already at {}", to_text(leaf),
                                         describe(schedule, other->second)));
        }
      }
    }
  }
  return index;
}

std::optional<PipelinePosition> PipelineIndex::find(Kind kind, int stage, int microbatch) const {
  const auto found = positions_.find(key_of(kind, stage, microbatch));
  if (found == positions_.end()) return std::nullopt;
  return found->second;
}

std::optional<PipelinePosition> PipelineIndex::find_backward(int stage, int microbatch) const {
  const auto backward = find(Kind::kBackward, stage, microbatch);
  return backward ? backward : find(Kind::kInputGrad, stage, microbatch);
}

Result<std::vector<PipelinePosition>> PipelineIndex::needs_of(const PipelineSchedule& schedule,
                                                              const PipelineAction& action) const {
  std::vector<PipelinePosition> needs;
  for (const PipelineAction& leaf : leaves_of(action)) {
    CADRE_RETURN_IF_ERROR(needs_of_leaf(schedule, leaf, needs));
  }
  return needs;
}

Status PipelineIndex::needs_of_leaf(const PipelineSchedule& schedule, const PipelineAction& leaf,
                                    std::vector<PipelinePosition>& needs) const {
  if (!leaf.microbatch) return {};
  const int microbatch = *leaf.microbatch;
  const auto add = [&](Kind kind, int stage) -> Status {
    const auto position =
        kind == Kind::kBackward ? find_backward(stage, microbatch) : find(kind, stage, microbatch);
    if (!position) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{} needs {}, which no rank runs",
                        describe(schedule, *find(leaf.kind, leaf.stage, microbatch)),
                        to_text({.kind = kind, .stage = stage, .microbatch = microbatch})));
    }
    needs.push_back(*position);
    return {};
  };
  // Adds to the needed actions the computation of a neighbouring stage, or the receive that brings
  // its result.
  const auto add_input = [&](Kind computation, Kind receive, int from) -> Status {
    if (from < 0 || from >= schedule.num_stages()) return {};
    const bool is_received =
        has_messages_ && schedule.rank_of_stage[from] != schedule.rank_of_stage[leaf.stage];
    return is_received ? add(receive, leaf.stage) : add(computation, from);
  };
  switch (leaf.kind) {
    case Kind::kForward:
      return add_input(Kind::kForward, Kind::kRecvForward, leaf.stage - 1);
    case Kind::kBackward:
    case Kind::kInputGrad:
      CADRE_RETURN_IF_ERROR(add(Kind::kForward, leaf.stage));
      return add_input(Kind::kBackward, Kind::kRecvBackward, leaf.stage + 1);
    case Kind::kWeightGrad:
      return add(Kind::kInputGrad, leaf.stage);
    case Kind::kSendForward:
      return add(Kind::kForward, leaf.stage);
    case Kind::kSendBackward:
      return add(Kind::kBackward, leaf.stage);
    case Kind::kRecvForward:
      return add(Kind::kSendForward, leaf.stage - 1);
    case Kind::kRecvBackward:
      return add(Kind::kSendBackward, leaf.stage + 1);
    case Kind::kUnshard:
    case Kind::kReshard:
    case Kind::kReduceGrad:
    case Kind::kOverlap:
      break;
  }
  return {};
}

Status walk_pipeline(const PipelineSchedule& schedule, const PipelineIndex& index,
                     const std::function<void(const PipelineVisit&)>& visit) {
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  std::vector<size_t> next_steps(num_ranks, 0);
  // The actions that the next action of each rank needs, computed once for each action.
  std::vector<std::optional<std::vector<PipelinePosition>>> needs(num_ranks);
  for (bool is_complete = false; !is_complete;) {
    is_complete = true;
    bool has_progress = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const size_t step = next_steps[rank];
      if (step == schedule.ranks[rank].size()) continue;
      is_complete = false;
      const PipelineAction& action = schedule.ranks[rank][step];
      if (!needs[rank]) {
        auto found = index.needs_of(schedule, action);
        if (!found.ok()) return found.error();
        needs[rank] = std::move(found).value();
      }
      if (!is_ready(*needs[rank], next_steps)) continue;
      visit({.position = {rank, step}, .action = action, .needs = *needs[rank]});
      needs[rank].reset();
      ++next_steps[rank];
      has_progress = true;
    }
    if (!is_complete && !has_progress) return deadlock(schedule, index, next_steps);
  }
  return {};
}

}  // namespace cadre
