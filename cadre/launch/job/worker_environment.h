// What a worker finds: torchrun's variables and those of Cadre, and which signals it ignores.
//
// Threads: plain values. Blocking: never. Every variable is listed in
// docs/guide/running/launching.md.
// Source: torch.distributed.elastic's agent (RANK ... TORCHELASTIC_ERROR_FILE).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::launch {

// What all workers of a job on one host have in common.
struct JobIdentity {
  int num_workers = 1;
  std::string run_id;
  std::string role = "default";
  os::Secret token;        // the job's secret
  std::string store_host;  // where the job's store listens
  uint16_t store_port = 0;
  std::string error_folder;  // for the workers' error files
  int num_cores = 1;         // cores of the host, for all workers
};

// The file in which `rank` may store its exception as JSON.
std::string error_file_of(const JobIdentity& job, Rank rank);

// `inherited` with torchrun's and Cadre's variables added or replaced. OMP_NUM_THREADS, the number
// of cores divided by the workers, is set only if `inherited` has none.
os::Environment worker_environment(const os::Environment& inherited, const JobIdentity& job,
                                   Rank rank);

// As from a shell, a worker ignores what the launcher was started with ignored (SIGHUP under
// nohup), except the signals by which the launcher stops it, and SIGCHLD, without whose default a
// program learns nothing of its children.
std::vector<int> signals_ignored_by_workers(std::span<const int> ignored);

// For programs whose steps allocate the same sizes again and again: makes glibc's malloc keep freed
// memory, in huge pages, which saves system calls and TLB misses in each step. Does nothing if the
// user has set GLIBC_TUNABLES.
void keep_freed_memory(os::Environment& environment);

}  // namespace cadre::launch
