// The environment of a worker: torchrun's contract, and a little of our own.
//
// Threads: plain values. Blocking: never. Every variable is listed in docs/guide/launching.md.
// Source: torch.distributed.elastic's agent (RANK ... TORCHELASTIC_ERROR_FILE).
#pragma once

#include <cstdint>
#include <string>

#include "cadre/base/types.h"
#include "cadre/os/host/secret.h"
#include "cadre/os/proc/environment.h"

namespace cadre::launch {

// What all workers of a job on one host share.
struct JobIdentity {
  int num_workers = 1;
  std::string run_id;
  std::string role = "default";
  os::Secret token;        // the job's secret
  std::string store_host;  // where the job's store listens
  uint16_t store_port = 0;
  std::string error_folder;  // a worker may leave its exception there
  int num_cores = 1;         // to be shared out
};

// Where `rank` may leave its exception as JSON.
std::string error_file_of(const JobIdentity& job, Rank rank);

// `inherited` with the contract's variables over it. OMP_NUM_THREADS, the worker's fair share of
// the cores, is set only when the user has not.
os::Environment worker_environment(const os::Environment& inherited, const JobIdentity& job,
                                   Rank rank);

// For programs whose steps allocate the same sizes over and over: glibc's malloc keeps what is
// freed, in huge pages, so that a step neither asks the kernel for memory nor misses in the TLB.
// Leaves GLIBC_TUNABLES as the user has set it.
void keep_freed_memory(os::Environment& environment);

}  // namespace cadre::launch
