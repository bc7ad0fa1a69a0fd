#include "cadre/launch/job/preemption_report.h"

#include <algorithm>
#include <map>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/failure_report.h"

namespace cadre::launch {
namespace {

std::string state_text(const LeavingWorker& worker) {
  std::string text = worker.has_asked ? "called Preemption::must_leave(), and saved no snapshot"
                                      : "did not call Preemption::must_leave()";
  if (worker.exit.preemption) {
    text = cadre::format("saved step {}", worker.exit.preemption->saved_step.value_or(0));
  }
  if (!worker.has_ended) return text + ", did not end";
  return cadre::format("{}, ended with {}", text, exit_name(worker.exit.status));
}

}  // namespace

std::optional<PreemptionFile> read_preemption_file(const std::string& error_file) {
  const auto content =
      os::read_file(std::string(error_file).append(kPreemptionFileSuffix), kMaxPreemptionFileBytes);
  return content.ok() ? parse_preemption_file(*content) : std::nullopt;
}

bool PreemptionReport::has_begun() const {
  const bool have_all_succeeded = std::ranges::all_of(workers, [](const LeavingWorker& worker) {
    return worker.has_ended && worker.exit.status.is_success();
  });
  return !have_all_succeeded && std::ranges::any_of(workers, [](const LeavingWorker& worker) {
    return worker.has_asked || worker.exit.preemption;
  });
}

std::optional<PreemptionFile> PreemptionReport::saved_by_all() const {
  if (workers.empty()) return std::nullopt;
  const std::optional<PreemptionFile>& first = workers.front().exit.preemption;
  const bool are_equal = std::ranges::all_of(
      workers, [&](const LeavingWorker& worker) { return worker.exit.preemption == first; });
  return are_equal ? first : std::nullopt;
}

std::string PreemptionReport::to_text() const {
  std::string text = "preempted";
  if (signal != 0) text += " by " + os::signal_name(signal);
  if (const auto saved = saved_by_all()) {
    return cadre::format(
        "{}, saved at step {} by {}; exit code {} asks for another run", text, *saved->saved_step,
        workers.size() == 1 ? "1 rank" : cadre::format("all {} ranks", workers.size()),
        saved->exit_code);
  }
  std::map<std::string, std::vector<int>> by_state;
  for (const LeavingWorker& worker : workers) {
    by_state[state_text(worker)].push_back(worker.exit.rank);
  }
  text += ", but no step was saved by all ranks";
  std::string_view separator = ": ";
  for (auto& [state, ranks] : by_state) {
    std::ranges::sort(ranks);
    text += cadre::format("{}{} {} {}", separator, ranks.size() == 1 ? "rank" : "ranks",
                          rank_ranges(ranks), state);
    separator = "; ";
  }
  return text;
}

}  // namespace cadre::launch
