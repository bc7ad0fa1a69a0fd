// Runs one job on this host, from starting its store to the report of a failure, or this host's
// part in a job on several hosts.
//
// Threads: the process's main thread, before any other was started. Blocking: as long as the job
// runs; stopping takes at most the grace period and a few seconds. Lifetime: when run_job()
// returns, no process, port or file of the job is left. Errors: kInvalidArgument if the program
// cannot be executed, kUnavailable if the machine has too few processes, too little memory or too
// few descriptors, as one sentence each. If the store cannot be opened or workers fail, run_job()
// reports that on standard error and in the exit code; the log lines of the store are written to
// standard error, too.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/hosts/join_job.h"
#include "cadre/launch/job/job_events.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/output/log_spec.h"

namespace cadre::launch {

struct JobSpec {
  // The path of the program that each worker executes. Not used if `worker_main` is set.
  std::string executable;
  // If set, the workers are forked from the process that calls run_job(), and each calls this
  // function instead of executing a program (core/os/proc/fork/fork_server.h).
  std::function<int()> worker_main = {};
  // If set, it gets the rank that failed first and one sentence about it at the end of the job. The
  // launcher then prints no report.
  std::function<void(Rank rank, const std::string& sentence)> on_failure = {};
  // The argv of a worker, in which "${local_rank}" is replaced by the worker's local rank.
  std::vector<std::string> arguments;
  // The environment of the workers, to which torchrun's variables are added.
  os::Environment environment;
  os::Inherited inherited;  // settings of the launcher's parent, which are restored for the workers
  int num_workers = 1;
  std::string run_id;  // if empty, the launcher makes a random id
  std::string role = "default";
  uint16_t store_port = 0;  // 0 means a free port
  LogLevel log_level = LogLevel::kWarning;
  // The folder for the workers' error files. It must exist, and only its owner may have access.
  std::string folder;
  // The text before each line; line_prefix.h lists what is replaced in it.
  std::string prefix_template = "[${rank}] ";
  bool colour_prefix = false;
  // The output of rank 0 is passed on unchanged, so that it can rewrite lines in place.
  bool is_rank0_raw = false;
  // Exit codes with which a worker says that it has printed the reason of its failure itself. The
  // launcher then prints no report.
  std::vector<int> reported_exit_codes;
  LogSpec logs;
  EventTargets events;
  // LOCAL_RANK is 0 in each worker, which sees one GPU only (worker_environment.h).
  bool has_virtual_local_ranks = false;
  // The local rank that reads from the launcher's standard input; the others read from /dev/null.
  std::optional<int> input_rank;
  // The cores to which each worker is bound, by local rank; empty: the workers are not bound.
  std::vector<std::vector<int>> cores_of_rank;
  // The signals that stop the job, among SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2. The
  // workers get the same signal. Of the other ones SIGUSR1 and SIGUSR2 are forwarded to the workers
  // without stopping the job, and the others kill it at once.
  std::vector<int> stop_signals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
  // The path of the `cadre` command, which reads the stack of a worker that has crashed
  // (failure/crash_report.h).
  std::string command;
  // How often all workers are started again after one of them has failed.
  int max_restarts = 0;
  // Exit codes of failures that a restart would only repeat. They end the job without a restart.
  std::vector<int> final_exit_codes;
  // How this host joins a job on several hosts; nullopt if the job has this host only.
  std::optional<HostsSpec> hosts;
  // The time between the first signal to a worker and SIGKILL.
  Duration stop_grace = std::chrono::seconds(30);
};

// Runs the job to its end and returns the launcher's exit code: 0, the code of the first worker
// that failed in the last attempt (128 + signal if a signal ended it), 128 + the signal that
// stopped the job, also instead of a restart, or 1 if the store could not be opened or output could
// not be written (a full disk). `guardian_gone` becomes readable when all processes of the job must
// be killed at once (core/os/proc/guardian.h).
Result<int> run_job(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone);

}  // namespace cadre::launch
