// The place of this `cadre run` among those that a scheduler has started, one on each host, read
// from the variables of srun, mpirun, mpiexec and Kubernetes.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the variable, its value
// and what to do, if a value is invalid or if several `cadre run` were started on one host.
// Sources: srun(1) of Slurm 22.05, "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI 4.1;
// Hydra of MPICH 4.0; the pods of a Kubernetes Job in the completion mode Indexed, which JobSet
// uses, too.
//
//   srun      SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_PROCID, SLURM_STEP_NODELIST
//   mpirun    OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, OMPI_COMM_WORLD_RANK
//   mpiexec   PMI_SIZE, MPI_LOCALNRANKS, PMI_RANK; other process managers set no MPI_LOCALNRANKS
//   Indexed   JOB_COMPLETION_INDEX; Kubernetes passes no number of pods
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

struct SchedulerPlace {
  std::string_view scheduler;    // "srun", "mpirun (Open MPI)", ...
  std::optional<int> num_nodes;  // at least 2; nullopt if the scheduler does not pass it
  int node_rank = 0;             // a default of --node-rank
  std::string first_host;        // a default of --master-addr; empty if it is unknown
  std::string evidence;          // "SLURM_STEP_NUM_TASKS is 2", for errors

  friend bool operator==(const SchedulerPlace&, const SchedulerPlace&) = default;
};

// Returns nullopt if this `cadre run` is alone, or if it was started by a worker of a launcher,
// which may have inherited the variables of a scheduler.
Result<std::optional<SchedulerPlace>> read_scheduler_place(const os::Environment& environment);

// Returns the first host of a list in Slurm's form, such as "node[03-05,9],login1".
std::string first_host_of(std::string_view node_list);

}  // namespace cadre::cli
