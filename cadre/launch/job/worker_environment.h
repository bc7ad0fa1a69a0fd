// What a worker inherits: torchrun's variables and those of Cadre, and the signals that it ignores.
//
// Threads: plain values. Blocking: never. Every variable is listed in
// docs/guide/running/launching.md.
// Source: torch.distributed.elastic's agent (RANK ... TORCHELASTIC_ERROR_FILE).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/launch/agent/table.h"

namespace cadre::launch {

// The properties of a job that all its workers on this host share.
struct JobIdentity {
  int num_workers = 1;  // the number of workers on this host
  // The ranks of the workers, if the job has several hosts; else their local ranks are their ranks.
  std::optional<HostRanks> ranks;
  std::string run_id;
  std::string job_id;  // differs from the id of each other job, also of one with the same run_id
  std::string role = "default";
  os::Secret token;        // the secret of the job
  std::string store_host;  // the address of the job's store
  uint16_t store_port = 0;
  // The launcher's temporary folder. It has the recovery files, and the workers' error files if
  // there is no log folder.
  std::string error_folder;
  std::string
      log_folder;     // folder of the job's log files, which has the error files, too, or empty
  int num_cores = 1;  // cores of the host, for all workers
  // The cores to which each worker is bound, by local rank; empty: the workers are not bound.
  std::vector<std::vector<int>> cores_of_rank;
  int attempt = 0;        // how often the workers of this host were started before
  int restart_count = 0;  // how often the workers were started again after a failure
  int max_restarts = 0;
  // LOCAL_RANK is 0 in each worker, which sees one GPU only.
  bool has_virtual_local_ranks = false;
};

// Returns the value of CUDA_VISIBLE_DEVICES that leaves the GPU of one worker visible: the entry of
// that index in the variable, or the index itself if the variable is not set. If no GPU is visible,
// none is in the worker. Errors: kInvalidArgument if the variable has too few entries, or if this
// one is empty. Source: torchrun's --virtual-local-rank.
Result<std::string> gpu_of_worker(const os::Environment& inherited, Rank local_rank);

// Returns the ranks of the workers on this host.
HostRanks ranks_of(const JobIdentity& job);
// Returns the rank of the worker with this local rank.
Rank rank_of(const JobIdentity& job, int local_rank);
int local_rank_of(const JobIdentity& job, Rank rank);
// Returns the number of workers of all hosts.
int world_size(const JobIdentity& job);

// Returns the file in which a worker may store its exception as JSON. Each attempt has files of its
// own.
std::string error_file_of(const JobIdentity& job, int local_rank);

// Returns the file in which a worker says whether it waits for a new membership. It is in the
// launcher's temporary folder also if there are log files: workers open such files often, and a log
// folder may be on a server.
std::string recovery_file_of(const JobIdentity& job, int local_rank);

// Returns `inherited` with torchrun's and Cadre's variables added or replaced. OMP_NUM_THREADS is
// set to the number of cores divided by the number of workers, and at most to the number of cores
// to which the worker is bound, unless `inherited` has it. REQUIRES: with virtual local ranks,
// gpu_of_worker() succeeds for `local_rank`.
os::Environment worker_environment(const os::Environment& inherited, const JobIdentity& job,
                                   int local_rank);

// Returns the signals that a worker ignores: like under a shell, those that the launcher ignored at
// its start (SIGHUP under nohup). Exceptions are the signals with which the launcher stops workers,
// and SIGCHLD: a process that ignores it gets no exit status of its children.
std::vector<int> signals_ignored_by_workers(std::span<const int> ignored);

// Makes glibc's malloc keep freed memory, in huge pages. This saves system calls and TLB misses in
// programs whose steps allocate the same sizes again and again. Does nothing if the user has set
// GLIBC_TUNABLES.
void keep_freed_memory(os::Environment& environment);

}  // namespace cadre::launch
