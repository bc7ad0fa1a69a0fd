// The environment variables through which a launcher passes rank, world size and address to a
// process, read once.
//
// Threads: plain values. Blocking: never.
// Errors: kInvalidArgument naming the variable, its value and what it should be.
// Source: torchrun's contract (torch/distributed/elastic), so that its programs run unchanged.
//
//   RANK, WORLD_SIZE               this process's number and how many there are; both or neither
//   LOCAL_RANK, LOCAL_WORLD_SIZE   the same among the processes of this host; optional
//   Without the first two, those of mpirun and srun, if they started several processes:
//   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE         Open MPI
//   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS          MPICH and its descendants
//   SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID             srun; salloc and sbatch set no
//                                                                 number of tasks of a step
//   MASTER_ADDR, MASTER_PORT       where the job's store is; needed from two processes on
//   TORCHELASTIC_RESTART_COUNT     how often the launcher restarted the job; absent: 0
//   TORCHELASTIC_MAX_RESTARTS      how often the launcher may restart it; absent: 0
//   TORCHELASTIC_RUN_ID            the job's name in messages; optional
//   TORCHELASTIC_USE_AGENT_STORE   "True": the launcher hosts the store; else rank 0 does
//   CADRE_JOB_TOKEN                the job's secret; needed as soon as two hosts take part
//   CADRE_JOB_ID                   distinguishes the job from others, also from those of the same
//                                  name; optional
//   CADRE_ATTEMPT                  how often the launcher has started all workers before: after
//                                  failures, and when hosts came or went; absent: the number of
//                                  restarts
//   CADRE_LOG                      what is logged: debug, info, warning (default), error, off
//   CADRE_FLIGHT_RECORDS           a folder for the flight records, which is created; absent:
//                                  memory only
//   CADRE_TUNING_FILE              the file of `cadre tune` with the sizes at which collectives
//                                  change their algorithms; only rank 0 reads it; absent: defaults
//   CADRE_NCCL_LIBRARY             the path of the NCCL that groups on CUDA devices use; absent:
//                                  the libnccl.so.2 that libtorch has loaded
//   CADRE_RECOVERY_FILE            set by cadre run: if the file of this name with ".membership"
//                                  appended exists, the process has kept running through a failure
//                                  (Recovery), and the values there replace those of the
//                                  variables; ".lost" names ranks whose hosts were lost
//   CADRE_STORE_PROTOCOL           "native" or "c10d"; absent: c10d when a launcher hosts the store
//                                  and gave no token (torchrun), else native
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/wire/recovery/recovery_files.h"

namespace cadre {

// The rank, world size and address that the program itself gives. They have precedence over the
// variables. Source: the arguments of torch.distributed.init_process_group.
struct JobPlace {
  // Set both `rank` and `world_size`, or neither.
  std::optional<int> rank = {};
  std::optional<int> world_size = {};
  // "tcp://HOST:PORT" is the address at which rank 0 hosts the store, and "file:///PATH" is the
  // file of the store. "env://" and an empty text mean MASTER_ADDR and MASTER_PORT.
  std::string init_method = {};
};

struct JobEnvironment {
  // False if there is no launcher; then all other members have their defaults.
  bool is_launched = false;
  Rank rank = 0;
  int world_size = 1;
  std::optional<Rank> local_rank;
  std::optional<int> local_world_size;
  std::string master_addr;
  uint16_t master_port = 0;
  std::string store_file;  // replaces the address; empty if the store is not in a file
  int restart_count = 0;   // counts failures of workers only
  int attempt = 0;         // is restart_count, or larger if hosts came or went
  int max_restarts = 0;
  std::string run_id;
  std::string job_id;  // empty if the launcher gives none
  bool uses_agent_store = false;
  os::Secret job_token;
  StoreProtocol store_protocol = StoreProtocol::kNative;
  LogLevel log_level = LogLevel::kWarning;  // is also read if there is no launcher
  std::string flight_folder;                // is also read if there is no launcher
  std::string tuning_file;                  // is also read if there is no launcher
  std::string nccl_library;                 // is also read if there is no launcher
};

// Returns the value of a variable; nullopt if it is not set. An empty value counts as not set.
using VariableLookup = std::function<std::optional<std::string>(std::string_view name)>;

// `job_token` is the value of CADRE_JOB_TOKEN, for which `look_up` is not called. If it is empty,
// the job has no token.
CADRE_EXPORT Result<JobEnvironment> parse_job_environment(const VariableLookup& look_up,
                                                          const os::Secret& job_token,
                                                          const JobPlace& place = {});

// Reads this process's environment. Call it in main, before other threads change the environment.
// Removes CADRE_JOB_TOKEN from the environment: processes that this one starts do not inherit the
// token; later calls still find it (os/host/secret_variable.h).
CADRE_EXPORT Result<JobEnvironment> read_job_environment(const JobPlace& place = {});

// Returns the last membership that the launcher has given to this process after a failure; nullopt
// if it gave none.
std::optional<MembershipFile> read_given_membership();

// Returns a function that names the ranks whose hosts the launcher has lost, in ascending order, as
// Membership::lost_ranks; null without such a launcher. The ranks are numbered as in the membership
// that the process has now: the function returns no rank that is lost in an earlier or later one. A
// Recovery may be made later.
CADRE_EXPORT std::function<std::vector<Rank>()> lost_ranks_from_launcher(int world_size);

// Parses the value of CADRE_LOG; an empty text counts as not set.
CADRE_EXPORT Result<LogLevel> parse_log_level(std::string_view text);
// Returns "debug", "info", "warning", "error" or "off", the values of CADRE_LOG.
CADRE_EXPORT std::string_view log_level_name(LogLevel level);

}  // namespace cadre
