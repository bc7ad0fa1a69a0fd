#include "cadre/core/schedule/schedule_csv.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr int kNoRank = -1;  // means that the stage has no action yet

std::string_view without_quotes(std::string_view cell) {
  if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') {
    return cell.substr(1, cell.size() - 2);
  }
  return cell;
}

// Returns the text up to `separator` and removes both from `rest`.
std::string_view take_until(char separator, std::string_view& rest) {
  const size_t end = rest.find(separator);
  const std::string_view part = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 1);
  return part;
}

Result<std::vector<PipelineAction>> parse_line(std::string_view line, size_t number) {
  std::vector<PipelineAction> actions;
  for (size_t column = 1; !line.empty(); ++column) {
    const std::string_view cell = without_quotes(take_until(',', line));
    if (cell.find_first_not_of(" \t") == std::string_view::npos) continue;
    auto action = parse_pipeline_action(cell);
    if (!action.ok()) {
      return action.error().with_context(cadre::format("line {}, column {}", number, column));
    }
    actions.push_back(std::move(action).value());
  }
  return actions;
}

// Sets rank_of_stage and num_microbatches from the actions of the ranks. Returns an error if two
// ranks have actions of one stage, or if a stage has none.
Status take_placement(PipelineSchedule& schedule) {
  std::vector<int>& rank_of_stage = schedule.rank_of_stage;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (const PipelineAction& action : schedule.ranks[rank]) {
      for (const PipelineAction& leaf : leaves_of(action)) {
        if (leaf.stage >= schedule.num_stages()) rank_of_stage.resize(leaf.stage + 1, kNoRank);
        int& holder = rank_of_stage[leaf.stage];
        if (holder == kNoRank) holder = rank;
        if (holder != rank) {
          return Error(ErrorCode::kInvalidArgument,
                       cadre::format("line {}: {} is an action of stage {}, which line {} has "
                                     "already; each stage belongs to one rank",
                                     rank + 1, to_text(leaf), leaf.stage, holder + 1));
        }
        schedule.num_microbatches =
            std::max(schedule.num_microbatches, leaf.microbatch.value_or(-1) + 1);
      }
    }
  }
  const auto missing = std::ranges::find(rank_of_stage, kNoRank);
  if (missing != rank_of_stage.end()) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("no line has an action of stage {}, but a line has an action of stage {}",
                      missing - rank_of_stage.begin(), schedule.num_stages() - 1));
  }
  return {};
}

}  // namespace

std::string to_csv(const PipelineSchedule& schedule) {
  std::string text;
  for (const std::vector<PipelineAction>& actions : schedule.ranks) {
    for (size_t i = 0; i < actions.size(); ++i) {
      text += (i == 0 ? "" : ",") + to_text(actions[i]);
    }
    text += "\r\n";
  }
  return text;
}

Result<PipelineSchedule> parse_pipeline_csv(std::string_view text) {
  if (text.size() > kMaxPipelineCsvBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("the text has {} bytes; a schedule may have at most {}", text.size(),
                               kMaxPipelineCsvBytes));
  }
  PipelineSchedule schedule;
  while (!text.empty()) {
    std::string_view line = take_until('\n', text);
    if (line.ends_with('\r')) line.remove_suffix(1);
    auto actions = parse_line(line, schedule.ranks.size() + 1);
    if (!actions.ok()) return actions.error();
    schedule.ranks.push_back(std::move(actions).value());
  }
  if (schedule.ranks.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 "the text is empty; expected a line of actions for each rank");
  }
  CADRE_RETURN_IF_ERROR(take_placement(schedule));
  return schedule;
}

}  // namespace cadre
