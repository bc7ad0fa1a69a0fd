// Whether srun, mpirun or mpiexec has started this `cadre run` several times, and what their
// variables say about the job: the number of hosts, the rank of this one, and of srun the first
// one.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the variable, its value
// and what to do, if a value is invalid or if several `cadre run` were started on one host.
// Sources: srun(1) of Slurm 22.05, "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI 4.1;
// Hydra of MPICH 4.0.
//
//   srun      SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_PROCID, SLURM_STEP_NODELIST,
//             SLURM_JOB_ID, SLURM_STEP_ID
//   mpirun    OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, OMPI_COMM_WORLD_RANK
//   mpiexec   PMI_SIZE, MPI_LOCALNRANKS, PMI_RANK; other process managers set no MPI_LOCALNRANKS
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

// Several `cadre run` that a scheduler has started, one on each host.
struct SchedulerStart {
  std::string_view scheduler;  // "srun", "mpirun (Open MPI)", ...
  int num_nodes = 0;           // at least 2
  int node_rank = 0;           // below num_nodes
  std::string evidence;        // "SLURM_STEP_NUM_TASKS is 2", for errors
  // A name of the job's step and the first of its hosts, if srun has started the job. The other
  // starters set no variables for these; a process manager knows them (process_manager.h).
  std::string job;
  std::string first_host;

  friend bool operator==(const SchedulerStart&, const SchedulerStart&) = default;
};

// Returns nullopt if this `cadre run` is alone, or if it was started by a worker of a launcher,
// which may have inherited the variables of a scheduler.
Result<std::optional<SchedulerStart>> read_scheduler_start(const os::Environment& environment);

// Returns the first host of one of Slurm's lists, such as "node09" of "node[09-11,14],login1".
std::string first_host_of(std::string_view hosts);

}  // namespace cadre::cli
