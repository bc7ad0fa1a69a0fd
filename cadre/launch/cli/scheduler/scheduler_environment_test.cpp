// Tests by which variables a `cadre run` knows that a scheduler has started several. The values are
// those that the schedulers set: Open MPI 4.1.4 and Slurm 22.05 of Debian 12, MPICH 4.0.
#include "cadre/launch/cli/scheduler/scheduler_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using Variables = std::vector<std::pair<std::string, std::string>>;

Result<std::optional<SchedulerStart>> start_of(const Variables& variables) {
  os::Environment environment;
  for (const auto& [name, value] : variables) environment.set(name, value);
  return read_scheduler_start(environment);
}

std::string error_of(const Variables& variables) {
  const auto start = start_of(variables);
  return start.ok() ? "no error" : start.error().message();
}

// The second of two tasks on two nodes: srun -N 2 --ntasks-per-node=1.
const Variables kSlurm{{"SLURM_JOB_ID", "7"},         {"SLURM_STEP_NUM_TASKS", "2"},
                       {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                       {"SLURM_STEP_ID", "3"},        {"SLURM_STEP_NODELIST", "node[09-10]"},
                       {"SLURM_PROCID", "1"},         {"SLURM_NODEID", "1"},
                       {"SLURM_LOCALID", "0"},        {"SLURM_NTASKS", "2"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_SIZE", "3"},       {"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_NODE_RANK", "0"},  {"PMIX_RANK", "2"}};
const Variables kMpich{
    {"PMI_SIZE", "3"}, {"PMI_RANK", "0"}, {"MPI_LOCALNRANKS", "1"}, {"MPI_LOCALRANKID", "0"}};

Variables changed(Variables variables, const std::string& name, const std::string& value) {
  for (auto& [known, old] : variables) {
    if (known == name) old = value;
  }
  return variables;
}

TEST(SchedulerEnvironment, GivesTheNumberOfNodesTheRankAndTheFirstHost) {
  const SchedulerStart srun{.scheduler = "srun",
                            .num_nodes = 2,
                            .node_rank = 1,
                            .evidence = "SLURM_STEP_NUM_TASKS is 2",
                            .job = "slurm-7.3",
                            .first_host = "node09"};
  EXPECT_EQ(start_of(kSlurm).value_or_throw(), srun);
  const SchedulerStart mpirun{.scheduler = "mpirun (Open MPI)",
                              .num_nodes = 3,
                              .node_rank = 2,
                              .evidence = "OMPI_COMM_WORLD_SIZE is 3",
                              .job = {},
                              .first_host = {}};
  EXPECT_EQ(start_of(kOpenMpi).value_or_throw(), mpirun);
  const SchedulerStart mpiexec{.scheduler = "mpiexec (MPICH)",
                               .num_nodes = 3,
                               .node_rank = 0,
                               .evidence = "PMI_SIZE is 3",
                               .job = {},
                               .first_host = {}};
  EXPECT_EQ(start_of(kMpich).value_or_throw(), mpiexec);
}

TEST(SchedulerEnvironment, FindsTheFirstHostInAList) {
  for (const auto& [hosts, first] : {std::pair{"node09", "node09"},
                                     {"node[09-11,14],login1", "node09"},
                                     {"a1,b[2-3]", "a1"},
                                     {"rack[2,4]node[3-5]x", "rack2node3x"},
                                     {"", ""},
                                     {"n[", "n"}}) {
    EXPECT_EQ(first_host_of(hosts), first) << hosts;
  }
}

Variables together(Variables first, const Variables& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST(SchedulerEnvironment, MpirunAndMpiexecCountBeforeTheSrunThatTheyUse) {
  const Variables daemons = changed(kSlurm, "SLURM_STEP_NUM_NODES", "1");
  EXPECT_EQ(start_of(together(daemons, kOpenMpi)).value_or_throw()->num_nodes, 3);
  EXPECT_EQ(start_of(together(daemons, kMpich)).value_or_throw()->num_nodes, 3);
  const Variables of_srun{{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}};
  EXPECT_EQ(start_of(together(kSlurm, of_srun)).value_or_throw()->scheduler, "srun");
  EXPECT_EQ(start_of(of_srun).value_or_throw()->scheduler, "a process manager (PMI)");
}

TEST(SchedulerEnvironment, OneTaskAnAllocationAndAWorkerAreAlone) {
  for (const Variables& variables : std::vector<Variables>{
           {},
           {{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}},
           {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_PROCID", "0"}},
           {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}},
           {{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}}) {
    EXPECT_EQ(start_of(variables).value_or_throw(), std::nullopt);
  }
  Variables worker = kSlurm;
  worker.emplace_back("TORCHELASTIC_RUN_ID", "job");
  EXPECT_EQ(start_of(worker).value_or_throw(), std::nullopt);
}

TEST(SchedulerEnvironment, SeveralOnOneHostAreRefusedWithTheStartersOption) {
  EXPECT_THAT(error_of(changed(kSlurm, "SLURM_STEP_NUM_NODES", "1")),
              HasSubstr("srun has started several `cadre run` on a host (SLURM_STEP_NUM_TASKS is "
                        "2), each of which would start a job of its own: start one for each host "
                        "(--ntasks-per-node=1)"));
  EXPECT_THAT(error_of(changed(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "3")),
              HasSubstr("(--npernode 1)"));
  EXPECT_THAT(error_of(changed(kMpich, "MPI_LOCALNRANKS", "2")), HasSubstr("(-ppn 1)"));
}

TEST(SchedulerEnvironment, AnInvalidValueIsNamed) {
  EXPECT_EQ(error_of(changed(kSlurm, "SLURM_STEP_NUM_NODES", "3")),
            "SLURM_STEP_NUM_NODES is \"3\", expected a number from 1 to 2; unset it, or give "
            "--nnodes, which takes precedence");
  for (const auto& [variables, name] :
       {std::pair{kSlurm, "SLURM_STEP_NUM_TASKS"}, std::pair{kSlurm, "SLURM_STEP_NUM_NODES"},
        std::pair{kOpenMpi, "OMPI_COMM_WORLD_SIZE"}, std::pair{kMpich, "MPI_LOCALNRANKS"}}) {
    EXPECT_THAT(error_of(changed(variables, name, "many")), HasSubstr(name));
  }
}

TEST(SchedulerEnvironment, CadreRunOfSeveralIndependentJobsStartsEachOnOneHost) {
  EXPECT_EQ(run_cadre({"run", "--nnodes", "1", "true"}, kSlurm).exit_code, 0);
  EXPECT_EQ(run_cadre({"run", "--standalone", "true"}, kSlurm).exit_code, 0);
  const auto one = run_cadre({"run", "--nproc-per-node", "2", "sh", "-c", "echo $RANK/$WORLD_SIZE"},
                             {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_EQ(one.exit_code, 0) << one.error;
  EXPECT_THAT(one.output, HasSubstr("[1] 1/2\n"));
}

}  // namespace
}  // namespace cadre::cli
