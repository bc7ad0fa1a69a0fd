#include "cadre/launch/job/dry_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cadre/launch/hosts/join_job.h"

namespace cadre::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(DryRun, ListsArgumentsAndVariablesOfAllWorkersAndOfEach) {
  JobSpec spec{.executable = "/bin/train",
               .arguments = {"train", "--device=${local_rank}", "it's", ""},
               .num_workers = 2,
               .run_id = "seven"};
  spec.environment.set("OMP_NUM_THREADS", "3");
  spec.environment.set("HOME", "/root");
  EXPECT_EQ(dry_run_text(spec),
            R"(program: /bin/train
workers: 2
environment added for all workers:
  CADRE_ATTEMPT=0
  CADRE_JOB_ID=<random>
  CADRE_JOB_TOKEN=<secret>
  CADRE_STORE_PROTOCOL=native
  GROUP_RANK=0
  GROUP_WORLD_SIZE=1
  LOCAL_WORLD_SIZE=2
  MASTER_ADDR=127.0.0.1
  MASTER_PORT=<free port>
  ROLE_NAME=default
  ROLE_WORLD_SIZE=2
  TORCHELASTIC_MAX_RESTARTS=0
  TORCHELASTIC_RESTART_COUNT=0
  TORCHELASTIC_RUN_ID=seven
  TORCHELASTIC_USE_AGENT_STORE=True
  TORCH_NCCL_ASYNC_ERROR_HANDLING=1
  WORLD_SIZE=2
rank 0: train --device=0 'it'\''s' ''
  CADRE_RECOVERY_FILE=<temporary folder>/attempt0-rank0.recovery
  LOCAL_RANK=0
  RANK=0
  ROLE_RANK=0
  TORCHELASTIC_ERROR_FILE=<temporary folder>/attempt0-rank0.json
rank 1: train --device=1 'it'\''s' ''
  CADRE_RECOVERY_FILE=<temporary folder>/attempt0-rank1.recovery
  LOCAL_RANK=1
  RANK=1
  ROLE_RANK=1
  TORCHELASTIC_ERROR_FILE=<temporary folder>/attempt0-rank1.json
)");
}

// The ranks of a host are given when all hosts are there.
TEST(DryRun, LeavesRanksOfAJobOnSeveralHostsOpen) {
  JobSpec spec{.executable = "/bin/train", .arguments = {"train"}, .num_workers = 2};
  spec.hosts = HostsSpec{.min_hosts = 2, .max_hosts = 3};
  const std::string text = dry_run_text(spec);
  EXPECT_THAT(text, HasSubstr("workers: 2\nhosts: 2 to 3\n"));
  EXPECT_THAT(text, HasSubstr("  WORLD_SIZE=<known when the hosts have met>\n"));
  EXPECT_THAT(text, HasSubstr("  MASTER_PORT=<known when the hosts have met>\n"));
  EXPECT_THAT(text, HasSubstr("  LOCAL_RANK=1\n  TORCHELASTIC_ERROR_FILE="));
  EXPECT_THAT(text, Not(HasSubstr("  WORLD_SIZE=2\n")));
}

TEST(DryRun, NamesTheCoresOfEachWorker) {
  JobSpec spec{.executable = "/bin/train", .arguments = {"train"}, .num_workers = 2};
  spec.cores_of_rank = {{0, 1, 2, 8}, {4}};
  EXPECT_THAT(dry_run_text(spec), HasSubstr("rank 0: train\n  bound to cores 0-2, 8\n"));
  EXPECT_THAT(dry_run_text(spec), HasSubstr("rank 1: train\n  bound to cores 4\n"));
}

TEST(DryRun, NamesTheFolderOfTheLogFiles) {
  JobSpec spec{.executable = "/bin/train", .arguments = {"train"}, .run_id = "seven"};
  EXPECT_THAT(dry_run_text(spec), Not(HasSubstr("log files")));
  spec.logs.folder = "/var/logs";
  spec.logs.redirects.of_all.has_output = true;
  EXPECT_THAT(dry_run_text(spec),
              HasSubstr("log files: /var/logs/seven_xxxxxx/attempt_0/LOCALRANK/\n"));
  EXPECT_THAT(
      dry_run_text(spec),
      HasSubstr("  TORCHELASTIC_ERROR_FILE=/var/logs/seven_xxxxxx/attempt_0/0/error.json\n"));
}

}  // namespace
}  // namespace cadre::launch
