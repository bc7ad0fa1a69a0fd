// The job's store as a worker sees it: the environment leads to it, and the job's token opens it.
#include "cadre/cli/cadre_command_test.h"
#include "cadre/os/proc/executable.h"
#include "cadre/rendezvous/environment_rendezvous.h"

namespace cadre::cli {
namespace {

// The tests below start this one as their workers; alone it is a world of one.
TEST(RunStoreWorker, MeetsItsPeers) {
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(kPatience);
  auto environment = read_job_environment();
  ASSERT_TRUE(environment.ok()) << environment.error().message();
  EnvironmentRendezvous rendezvous(*system, *environment);
  const auto membership = rendezvous.join(deadline);
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  if (membership->world_size == 1) {
    EXPECT_EQ(membership->store, nullptr);
    return;
  }
  const auto sum = membership->store->add("sum", membership->rank + 1, deadline);
  ASSERT_TRUE(sum.ok());
  const int total = membership->world_size * (membership->world_size + 1) / 2;
  if (*sum == total) membership->store->set("all", "here", deadline).value_or_throw();
  EXPECT_EQ(membership->store->get("all", deadline).value_or_throw(), "here");
}

std::vector<std::string> worker_job(int num_workers) {
  return {"run", "--nproc-per-node", cadre::format("{}", num_workers),
          os::own_executable().value_or_throw(), "--gtest_filter=RunStoreWorker.MeetsItsPeers"};
}

TEST(RunStore, LetsAllWorkersMeet) {
  const auto result = run_cadre(worker_job(4));
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
}

TEST(RunStore, RefusesAWorkerWithAnotherToken) {
  std::vector<std::string> words = worker_job(2);
  words.insert(words.begin() + 3, {"env", "CADRE_JOB_TOKEN=wrong"});
  const auto result = run_cadre(words);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("token"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace cadre::cli
