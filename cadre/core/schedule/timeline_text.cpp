#include "cadre/core/schedule/timeline_text.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr std::string_view kIdleCell = ".";
constexpr std::string_view kBusyCell = "|";

using TextRow = std::vector<std::string>;

std::vector<double> begin_times(const PipelineTimeline& timeline) {
  std::vector<double> times;
  for (const auto& actions : timeline.ranks) {
    for (const TimedAction& action : actions) times.push_back(action.begin_ms);
  }
  std::ranges::sort(times);
  const auto rest = std::ranges::unique(times);
  times.erase(rest.begin(), rest.end());
  return times;
}

// Returns the cells of one rank at the given times.
TextRow cells_of(const std::vector<TimedAction>& actions, const std::vector<double>& times) {
  TextRow cells;
  size_t next = 0;
  for (const double time : times) {
    std::string cell;
    for (; next < actions.size() && actions[next].begin_ms <= time; ++next) {
      cell += (cell.empty() ? "" : " ") + to_text(actions[next].action);
    }
    if (cell.empty()) {
      // A rank that is in a receive counts as waiting.
      const bool is_busy =
          next > 0 && actions[next - 1].end_ms > time && !is_message(actions[next - 1].action.kind);
      cell = is_busy ? kBusyCell : kIdleCell;
    }
    cells.push_back(std::move(cell));
  }
  return cells;
}

// Formats the columns next to each other, each as wide as its widest cell. The first column is
// right-aligned.
std::string aligned(const std::vector<TextRow>& columns) {
  std::vector<size_t> widths;
  for (const TextRow& column : columns) {
    widths.push_back(std::ranges::max_element(column, {}, &std::string::size)->size());
  }
  std::string text;
  for (size_t line = 0; line < columns.front().size(); ++line) {
    for (size_t i = 0; i < columns.size(); ++i) {
      const std::string& cell = columns[i][line];
      const std::string blanks(widths[i] - cell.size(), ' ');
      text += i == 0 ? blanks + cell : "  " + cell + (i + 1 < columns.size() ? blanks : "");
    }
    text += '\n';
  }
  return text;
}

std::string percent(double share) {
  return cadre::format("{:.1f} %", share * 100);
}

std::vector<int> stages_of(const PipelineSchedule& schedule, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[stage] == rank) stages.push_back(stage);
  }
  return stages;
}

nlohmann::ordered_json json_of(const TimedAction& timed) {
  auto computations = nlohmann::ordered_json::array();
  for (const PipelineAction& leaf : leaves_of(timed.action)) {
    if (!is_computation(leaf.kind)) continue;
    computations.push_back(
        {{"kind", to_string(leaf.kind)}, {"stage", leaf.stage}, {"microbatch", *leaf.microbatch}});
  }
  return {{"action", to_text(timed.action)},
          {"begin_ms", timed.begin_ms},
          {"end_ms", timed.end_ms},
          {"computations", std::move(computations)}};
}

}  // namespace

std::string milliseconds_text(double ms) {
  return cadre::format("{}", std::round(ms * 1e3) / 1e3);
}

std::string timeline_table(const PipelineTimeline& timeline) {
  const std::vector<double> times = begin_times(timeline);
  std::vector<TextRow> columns{{"ms"}};
  for (const double time : times) columns[0].push_back(milliseconds_text(time));
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    columns.push_back({cadre::format("rank {}", rank)});
    std::ranges::move(cells_of(timeline.ranks[rank], times), std::back_inserter(columns.back()));
  }
  return aligned(columns);
}

std::string timeline_summary(const PipelineSchedule& schedule, const PipelineTimeline& timeline) {
  const double busiest = timeline.busy_ms.empty() ? 0 : *std::ranges::max_element(timeline.busy_ms);
  std::vector<TextRow> columns{{"rank"}, {"stages"}, {"busy ms"}, {"bubble"}, {"live activations"}};
  double idle_share = 0;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    std::string stages;
    for (const int stage : stages_of(schedule, rank)) {
      stages += cadre::format("{}{}", stages.empty() ? "" : " ", stage);
    }
    idle_share += timeline.bubble_share(rank) / schedule.num_ranks();
    columns[0].push_back(cadre::format("{}", rank));
    columns[1].push_back(stages);
    columns[2].push_back(milliseconds_text(timeline.busy_ms[rank]));
    columns[3].push_back(percent(timeline.bubble_share(rank)));
    columns[4].push_back(cadre::format("{}", timeline.peak_live_activations[rank]));
  }
  return cadre::format("step {} ms; busiest rank {} ms; bubble {} on average\n\n",
                       milliseconds_text(timeline.makespan_ms), milliseconds_text(busiest),
                       percent(idle_share)) +
         aligned(columns);
}

std::string timeline_json(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
                          std::string_view title) {
  auto ranks = nlohmann::ordered_json::array();
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    auto actions = nlohmann::ordered_json::array();
    for (const TimedAction& timed : timeline.ranks[rank]) actions.push_back(json_of(timed));
    ranks.push_back({{"stages", stages_of(schedule, rank)},
                     {"busy_ms", timeline.busy_ms[rank]},
                     {"bubble_share", timeline.bubble_share(rank)},
                     {"live_activations", timeline.peak_live_activations[rank]},
                     {"actions", std::move(actions)}});
  }
  const nlohmann::ordered_json json = {{"title", title},
                                       {"num_stages", schedule.num_stages()},
                                       {"num_microbatches", schedule.num_microbatches},
                                       {"step_ms", timeline.makespan_ms},
                                       {"ranks", std::move(ranks)}};
  // A title with a file's name may have bytes that are no UTF-8.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace cadre
