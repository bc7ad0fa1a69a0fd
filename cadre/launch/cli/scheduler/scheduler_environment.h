// Whether srun, mpirun or mpiexec has started this `cadre run` several times, read from their
// variables.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with the variable, its value
// and what to do, if a value is invalid or if several `cadre run` were started on one host.
// Sources: srun(1) of Slurm 22.05, "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI 4.1;
// Hydra of MPICH 4.0.
//
//   srun      SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_PROCID
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
  std::string evidence;        // "SLURM_STEP_NUM_TASKS is 2", for errors

  friend bool operator==(const SchedulerStart&, const SchedulerStart&) = default;
};

// Returns nullopt if this `cadre run` is alone, or if it was started by a worker of a launcher,
// which may have inherited the variables of a scheduler.
Result<std::optional<SchedulerStart>> read_scheduler_start(const os::Environment& environment);

}  // namespace cadre::cli
