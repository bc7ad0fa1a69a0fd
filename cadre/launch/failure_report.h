// The last thing on the screen when a job failed.
//
// Threads: a pure function. Blocking: never.
// Order: the last lines of the worker that failed first, then who it was and why, then one line for
// all others, then those that were stopped at that time and may be the cause. What a reader needs
// stands where the cursor is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>

#include "cadre/launch/worker_group.h"

namespace cadre::launch {

struct FailureReport {
  WorkerExit failure;
  std::string host;
  std::string exception;  // what the worker left in its error file; may be empty
  std::deque<std::string> last_lines;
  size_t num_lines_just_shown = 0;  // of these the last ones, which are not repeated
  int num_workers = 1;
  std::span<const WorkerExit> exits;  // of all workers, the failed one too
  uint64_t num_oom_kills = 0;
  // Ranks that the launcher killed, because they had not ended this long after the signal.
  std::span<const int> outlived = {};
  std::string grace = "";  // "30 s of SIGTERM"
};

// Several lines, the last one without its newline.
std::string to_text(const FailureReport& report);

// "0", "0-2, 5": for ascending ranks.
std::string rank_ranges(std::span<const int> ranks);

// The message of an error file as torch.distributed.elastic writes it; empty if there is none.
std::string exception_in(const std::string& error_file);

}  // namespace cadre::launch
