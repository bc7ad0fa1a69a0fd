// Runs a function of this program as several ranks that are processes. The job is that of `cadre
// run`: store, output, supervision and failures (job.h); only its workers are forked instead of
// executed.
//
// The calling process forks the launcher, which forks a guardian and a supervisor as `cadre run`
// does (core/os/proc/guardian.h). The supervisor first forks the template, from which it then forks
// the ranks (core/os/proc/fork/fork_server.h). So each rank is a copy of the calling process, and
// that process itself keeps its children, signals and settings.
//
// Threads: the only one of the process. Blocking: until all ranks have ended; after the first
// failure at most kSpawnStopGrace and a second. Lifetime: no process, folder or port is left, also
// if the calling process or one of the others is killed. Errors: kInvalidArgument if the process
// has other threads, kUnavailable if the machine has too few processes, memory or descriptors.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::launch {

// The time that the other ranks have to end after the first failure, before they are killed.
inline constexpr Duration kSpawnStopGrace = std::chrono::seconds(1);

struct SpawnedJob {
  int num_ranks = 1;
  // What each rank calls, with the environment of a worker of `cadre run`. Its value is the exit
  // code of the rank. It must not throw.
  std::function<int()> rank_main;
  // The text before each line that a rank writes (output/line_prefix.h lists what is replaced in
  // it).
  std::string prefix = {};
};

struct SpawnedJobEnd {
  // What ended the job; empty if all ranks succeeded.
  std::string failure = {};
  std::optional<Rank> failed_rank = {};  // the rank that failed first, if a rank failed
  int signal = 0;                        // the signal that has stopped the job; 0 if none
};

CADRE_EXPORT Result<SpawnedJobEnd> spawn_workers(const SpawnedJob& job);

}  // namespace cadre::launch
