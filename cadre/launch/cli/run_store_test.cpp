// Tests access to the job's store from a worker: its address is in the environment, and the job's
// token grants access.
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/os/proc/executable.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

// This test is the program of the workers that tests below start with `cadre run`. If it is run
// directly, the group has one rank.
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

// The kernel chooses the ports, so jobs that start at the same time do not collide.
TEST(RunStore, AHundredJobsAtOnceDoNotCollide) {
  std::vector<std::unique_ptr<CadreCommand>> jobs;
  for (int job = 0; job < 100; ++job) jobs.push_back(std::make_unique<CadreCommand>(worker_job(2)));
  for (const auto& job : jobs) {
    const CommandResult result = job->wait();
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  }
}

TEST(RunStore, RefusesAWorkerWithAnotherToken) {
  std::vector<std::string> words = worker_job(2);
  words.insert(words.begin() + 3, {"env", "CADRE_JOB_TOKEN=wrong"});
  const auto result = run_cadre(words);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("token"), std::string::npos) << result.output;
}

// Returns the command of a job whose worker connects to the store and sends bytes of another
// protocol. The worker ends when the store has closed the connection.
std::vector<std::string> stranger_job() {
  return {"run", "bash", "-c",
          "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT; echo rubbish >&3; cat <&3"};
}

TEST(RunStore, SaysWhomItDroppedAndWhy) {
  const auto result = run_cadre(stranger_job(), {{"CADRE_LOG", ""}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const std::regex line(
      "cadre: warning [0-9T:.-]+Z store dropped peer=tcp:127.0.0.1:[0-9]+ reason=\"its first bytes "
      "belong to no known protocol\"\n");
  EXPECT_TRUE(std::regex_match(result.error, line)) << result.error;
}

TEST(RunStore, OfManyStrangersAFewAreNamedAndTheOthersCounted) {
  const auto result = run_cadre({"run", "bash", "-c",
                                 "for i in {1..50}; do exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT; "
                                 "echo rubbish >&3; cat <&3; "
                                 "done"},
                                {{"CADRE_LOG", ""}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.error.find(" store dropped peer="), std::string::npos) << result.error;
  EXPECT_NE(result.error.find("more lines like these\n"), std::string::npos) << result.error;
  // The log keeps about five such lines in each interval. The limit leaves room for several
  // intervals, because the job is slow on a busy machine.
  EXPECT_LT(std::ranges::count(result.error, '\n'), 25) << result.error;
}

TEST(RunStore, LogsFromTheLevelOfItsWorkersOn) {
  EXPECT_EQ(run_cadre(stranger_job(), {{"CADRE_LOG", "error"}}).error, "");
  EXPECT_EQ(run_cadre(stranger_job(), {{"CADRE_LOG", "off"}}).error, "");
  EXPECT_NE(run_cadre(stranger_job(), {{"CADRE_LOG", "debug"}}).error, "");
  // The end of a client that disconnects normally is logged only at level debug.
  EXPECT_EQ(run_cadre(worker_job(2), {{"CADRE_LOG", "info"}}).error, "");
}

TEST(RunStore, ABusyPortIsSaidWithItsRemedy) {
  const auto system = os::make_native_system();
  const auto busy = system->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const std::string port = cadre::format("{}", busy->address().port);
  const auto result = run_cadre({"run", "--master-port", port, "true"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error,
            cadre::format("cadre: start the job's store: store server: listen on tcp:127.0.0.1:{}: "
                          "Address already in use (errno 98); choose another --master-port or "
                          "leave it out\n",
                          port));
}

TEST(RunStore, APortIsANumber) {
  for (const std::string wrong : {"99999", "-1", "http", "80x"}) {
    const auto result = run_cadre({"run", "--master-port=" + wrong, "true"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.error,
              cadre::format("cadre run: --master-port {}: expected a number from 1 to 65535, or 0 "
                            "for a free port\n",
                            wrong));
  }
  EXPECT_EQ(run_cadre({"run", "--master-port", "0", "true"}).exit_code, 0);
}

}  // namespace
}  // namespace cadre::cli
