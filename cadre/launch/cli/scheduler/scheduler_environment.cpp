#include "cadre/launch/cli/scheduler/scheduler_environment.h"

#include <array>
#include <charconv>
#include <limits>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

// The variables of one starter of processes. A starter has `num_nodes`, `num_local` or neither.
struct StarterVariables {
  std::string_view scheduler;
  std::string_view size;
  std::string_view rank;
  std::string_view num_nodes;
  std::string_view num_local;
  std::string_view one_per_host;  // its option that starts one process on each host
  std::string_view hosts;         // a list of the hosts, or ""
};

// The first one whose variables are set counts. In an allocation of Slurm mpirun and mpiexec start
// their processes through srun, so these have variables of srun, too, which describe its own tasks.
// srun itself sets PMI_SIZE and PMI_RANK (--mpi=pmi2), but no variable for a host.
constexpr std::array kStarters{StarterVariables{.scheduler = "mpirun (Open MPI)",
                                                .size = "OMPI_COMM_WORLD_SIZE",
                                                .rank = "OMPI_COMM_WORLD_RANK",
                                                .num_local = "OMPI_COMM_WORLD_LOCAL_SIZE",
                                                .one_per_host = "--npernode 1"},
                               StarterVariables{.scheduler = "mpiexec (MPICH)",
                                                .size = "PMI_SIZE",
                                                .rank = "PMI_RANK",
                                                .num_local = "MPI_LOCALNRANKS",
                                                .one_per_host = "-ppn 1"},
                               StarterVariables{.scheduler = "srun",
                                                .size = "SLURM_STEP_NUM_TASKS",
                                                .rank = "SLURM_PROCID",
                                                .num_nodes = "SLURM_STEP_NUM_NODES",
                                                .one_per_host = "--ntasks-per-node=1",
                                                .hosts = "SLURM_STEP_NODELIST"},
                               StarterVariables{.scheduler = "a process manager (PMI)",
                                                .size = "PMI_SIZE",
                                                .rank = "PMI_RANK",
                                                .one_per_host = "see its manual"}};

Result<int> read_number(const os::Environment& environment, std::string_view name, int low,
                        int high) {
  const std::string value = environment.get_or(name, "");
  const char* const end = value.data() + value.size();
  int number = 0;
  const auto parsed = std::from_chars(value.data(), end, number);
  const bool is_number = parsed.ec == std::errc() && parsed.ptr == end;
  if (is_number && number >= low && number <= high) return number;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{} is \"{}\", expected a number from {} to {}; unset it, or give "
                             "--nnodes, which takes precedence",
                             name, value, low, high));
}

bool is_set(const os::Environment& environment, std::string_view name) {
  return name.empty() || !environment.get_or(name, "").empty();
}

// Returns whether there is at most one process of the starter on each host, as far as it says.
Result<bool> is_one_per_host(const os::Environment& environment, const StarterVariables& names,
                             int size) {
  const bool counts_nodes = !names.num_nodes.empty();
  const std::string_view name = counts_nodes ? names.num_nodes : names.num_local;
  if (name.empty()) return true;
  const auto number = read_number(environment, name, 1, size);
  if (!number.ok()) return number.error();
  return *number == (counts_nodes ? size : 1);
}

Result<std::optional<SchedulerStart>> read_start(const os::Environment& environment,
                                                 const StarterVariables& names) {
  const auto size = read_number(environment, names.size, 1, std::numeric_limits<int>::max());
  if (!size.ok()) return size.error();
  if (*size == 1) return std::optional<SchedulerStart>();
  const std::string evidence = cadre::format("{} is {}", names.size, *size);
  const auto is_alone_here = is_one_per_host(environment, names, *size);
  if (!is_alone_here.ok()) return is_alone_here.error();
  if (!*is_alone_here) {
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("{} has started several `cadre run` on a host ({}), each of which would "
                      "start a job of its own: start one for each host ({}) and let "
                      "--nproc-per-node say how many workers it has, or give --nnodes 1 if these "
                      "are independent jobs",
                      names.scheduler, evidence, names.one_per_host));
  }
  const auto rank = read_number(environment, names.rank, 0, *size - 1);
  if (!rank.ok()) return rank.error();
  SchedulerStart start{.scheduler = names.scheduler,
                       .num_nodes = *size,
                       .node_rank = *rank,
                       .evidence = evidence,
                       .job = {},
                       .first_host = {}};
  if (!names.hosts.empty()) {
    start.first_host = first_host_of(environment.get_or(names.hosts, ""));
    start.job = cadre::format("slurm-{}.{}", environment.get_or("SLURM_JOB_ID", "0"),
                              environment.get_or("SLURM_STEP_ID", "0"));
  }
  return std::optional(std::move(start));
}

}  // namespace

std::string first_host_of(std::string_view hosts) {
  std::string first;
  bool is_in_brackets = false;
  bool is_skipped = false;  // the character follows the first element of the brackets
  for (const char c : hosts) {
    if (c == '[') {
      is_in_brackets = true;
    } else if (c == ']') {
      is_in_brackets = is_skipped = false;
    } else if (is_in_brackets) {
      is_skipped = is_skipped || c == ',' || c == '-';
      if (!is_skipped) first += c;
    } else if (c == ',') {
      return first;
    } else {
      first += c;
    }
  }
  return first;
}

Result<std::optional<SchedulerStart>> read_scheduler_start(const os::Environment& environment) {
  if (environment.get("TORCHELASTIC_RUN_ID")) return std::optional<SchedulerStart>();
  for (const StarterVariables& names : kStarters) {
    const bool has_started_this =
        is_set(environment, names.size) && is_set(environment, names.rank) &&
        is_set(environment, names.num_nodes) && is_set(environment, names.num_local);
    if (has_started_this) return read_start(environment, names);
  }
  return std::optional<SchedulerStart>();
}

}  // namespace cadre::cli
