// The report at the end of the output of a failed job.
//
// Threads: a pure function. The report has these parts in this order: the last output lines of the
// worker that failed first, its stack if it crashed, its rank and the reason, one line about the
// other workers, and the workers that a signal had stopped, which may be the cause. The most
// important lines are last, where the cursor of the terminal is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>

#include "cadre/launch/job/failure/crash_report.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

struct FailureReport {
  WorkerExit failure;
  std::string host;
  std::string exception;  // the exception in the error file of the worker; may be empty
  std::optional<CrashReport> crash = {};
  std::deque<std::string> last_lines;
  // The number of these lines that the terminal has just shown. The report does not repeat them.
  size_t num_lines_just_shown = 0;
  int num_workers = 1;
  std::span<const WorkerExit> exits;  // the exits of all workers, the failed one included
  uint64_t num_oom_kills = 0;
  // The ranks that the launcher killed because they had not ended within `grace`.
  std::span<const int> outlived = {};
  std::string grace = "";       // for example "30 s of SIGTERM"
  std::string log_folder = "";  // the folder of the worker's log files; empty if there are none
};

// Returns several lines, the last one without its newline.
std::string to_text(const FailureReport& report);

// Formats ascending ranks, for example as "0" or "0-2, 5".
std::string rank_ranges(std::span<const int> ranks);

// Returns the message in an error file of torch.distributed.elastic; empty if there is none.
std::string exception_in(const std::string& error_file);

}  // namespace cadre::launch
