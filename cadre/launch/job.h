// One job on this host, from its store to the last word on the screen.
//
// Threads: the process's main thread, before any other was started. Blocking: as long as the job
// runs; every stop is bounded by the grace period and a few seconds.
// Lifetime: when run_job returns, no process, port or file of the job is left.
// Errors: kInvalidArgument when the program cannot be executed, kUnavailable when the machine lacks
// processes, memory or descriptors, as one sentence each. A store
// that cannot be opened, and what workers do, are no errors of run_job: they are reported on the
// error output and in the exit code. So is what the store logs.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/log.h"
#include "cadre/launch/buffered_output.h"
#include "cadre/os/proc/environment.h"
#include "cadre/os/system.h"

namespace cadre::launch {

struct JobSpec {
  std::string executable;              // a path
  std::vector<std::string> arguments;  // argv; "${local_rank}" in them becomes the worker's rank
  os::Environment environment;         // the contract's variables are added
  int num_workers = 1;
  std::string run_id;  // empty: a random one
  std::string role = "default";
  uint16_t store_port = 0;  // 0: a free one
  LogLevel log_level = LogLevel::kWarning;
  std::string folder;  // where workers leave their exceptions; exists, and is its owner's
  // Before each line; ${rank}, ${local_rank}, ${role_name} and ${host} are replaced.
  std::string prefix_template = "[${rank}] ";
  bool colour_prefix = false;
  // Rank 0's output passes as it is, so that it can show progress in place.
  bool is_rank0_raw = false;
  // With these a worker says that it has explained its failure itself: no report follows.
  std::vector<int> reported_exit_codes;
  // From the first signal to a worker to SIGKILL.
  Duration stop_grace = std::chrono::seconds(30);
};

// Runs the job to its end and returns the launcher's exit code: 0, the first failed worker's
// (128 + signal if one ended it), 128 + the signal that stopped the job, or 1 without a store or
// when output could not be written (a full disk). `guardian_gone` becomes readable when the job
// must vanish at once (os/proc/guardian.h).
Result<int> run_job(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone);

}  // namespace cadre::launch
