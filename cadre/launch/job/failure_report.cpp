#include "cadre/launch/job/failure_report.h"

#include <signal.h>

#include <algorithm>
#include <map>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/wire/error_file.h"
#include "cadre/launch/job/error_file.h"
#include "cadre/launch/job/exit_meaning.h"

namespace cadre::launch {
namespace {

constexpr size_t kMaxExceptionBytes = 1000;
constexpr size_t kMaxStackLines = 20;

std::string last_lines_text(const FailureReport& report) {
  if (report.last_lines.empty()) {
    return cadre::format("cadre: rank {} wrote nothing\n", report.failure.rank);
  }
  const size_t count = report.last_lines.size();
  const size_t num_shown = report.num_lines_just_shown;
  const std::string lines = count == 1 ? "line" : cadre::format("{} lines", count);
  std::string text = cadre::format("cadre: the last {} of rank {}", lines, report.failure.rank);
  if (num_shown == count) {
    return text + (count == 1 ? " is shown above\n" : " are shown above\n");
  }
  if (num_shown == 1) text += ", of which the last one is shown above";
  if (num_shown > 1) text += cadre::format(", of which the last {} are shown above", num_shown);
  text += ":\n";
  for (size_t i = 0; i < count - num_shown; ++i) {
    text += "    " + printable(report.last_lines[i]) + "\n";
  }
  return text;
}

std::string stack_text(const FailureReport& report) {
  if (!report.crash || report.crash->stack.empty()) return "";
  const std::vector<std::string>& stack = report.crash->stack;
  std::string text =
      cadre::format("cadre: the stack of rank {}, innermost call first:\n", report.failure.rank);
  for (size_t i = 0; i < std::min(stack.size(), kMaxStackLines); ++i) {
    text += "    " + printable(stack[i]) + "\n";
  }
  if (stack.size() > kMaxStackLines) {
    text += cadre::format("    and {} more\n", stack.size() - kMaxStackLines);
  }
  return text;
}

// Names the workers that a signal had stopped. They may be the cause: a worker that waits for a
// stopped one often fails first, with a timeout.
std::string stopped_text(const FailureReport& report) {
  std::vector<int> ranks;
  int signal = 0;
  for (const WorkerExit& ended : report.exits) {
    if (ended.stopped_by == 0) continue;
    ranks.push_back(ended.rank);
    signal = ended.stopped_by;
  }
  if (ranks.empty()) return "";
  std::ranges::sort(ranks);
  return cadre::format("  likely cause: {} {} {} stopped by {} when rank {} failed\n",
                       ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks),
                       ranks.size() == 1 ? "was" : "were", os::signal_name(signal),
                       report.failure.rank);
}

std::string outlived_text(const FailureReport& report, size_t num_ranks) {
  return cadre::format("killed, because {} did not end within {}", num_ranks == 1 ? "it" : "they",
                       report.grace);
}

// Returns one line for all other workers, grouped by exit status.
std::string others_text(const FailureReport& report) {
  const std::string stopped =
      cadre::format("stopped by cadre because rank {} failed", report.failure.rank);
  std::map<std::string, std::vector<int>> by_ending;
  for (const WorkerExit& ended : report.exits) {
    if (ended.rank == report.failure.rank) continue;
    std::string ending = "ended by " + exit_name(ended.status);
    if (ended.status.signal == SIGKILL &&
        std::ranges::count(report.outlived, ended.rank.value) > 0) {
      ending = outlived_text(report, report.outlived.size());
    } else if (ended.status.is_success()) {
      ending = ended.was_asked_to_stop ? stopped : "had succeeded";
    } else if (ended.preemption) {
      ending = cadre::format("saved step {} and left", ended.preemption->saved_step.value_or(0));
    } else if (ended.was_asked_to_stop && ended.status.signal != 0) {
      ending = stopped;
    }
    by_ending[ending].push_back(ended.rank);
  }
  std::string text;
  for (auto& [ending, ranks] : by_ending) {
    std::ranges::sort(ranks);
    text += cadre::format("{}{} {}: {}", text.empty() ? "  others: " : "; ",
                          ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks), ending);
  }
  return text.empty() ? text : text + "\n";
}

}  // namespace

std::string to_text(const FailureReport& report) {
  const WorkerExit& failure = report.failure;
  std::string text = last_lines_text(report) + stack_text(report);
  text += cadre::format("cadre: rank {} of {} failed with {} on {}, pid {}, after {:.1f} s\n",
                        failure.rank, report.num_workers, exit_name(failure.status), report.host,
                        failure.pid, std::chrono::duration<double>(failure.lifetime).count());
  const std::string meaning = exit_meaning(failure.status, report.num_oom_kills);
  if (!meaning.empty()) text += "  meaning: " + meaning + "\n";
  if (report.crash) text += "  crash: " + printable(report.crash->summary) + "\n";
  if (!report.exception.empty()) {
    text += "  exception: " + printable(report.exception.substr(0, kMaxExceptionBytes)) + "\n";
  }
  if (!report.log_folder.empty()) text += cadre::format("  log files: {}\n", report.log_folder);
  text += others_text(report);
  text += stopped_text(report);
  text.pop_back();
  return text;
}

std::string rank_ranges(std::span<const int> ranks) {
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += cadre::format("{}", ranks[first]);
    if (last > first) text += cadre::format("-{}", ranks[last]);
    first = last + 1;
  }
  return text;
}

std::string exception_in(const std::string& error_file) {
  const auto content = os::read_file(error_file, kMaxErrorFileBytes);
  if (!content.ok()) return "";
  const auto file = parse_error_file(*content);
  return file ? file->message : "";
}

}  // namespace cadre::launch
