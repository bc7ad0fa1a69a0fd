// Runs jobs of `cadre run` on several hosts, for which network namespaces are used: misleading
// names, IPv6, a host that is cut off, one that is frozen, and an agent that a stranger calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/namespaces.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using cli::CadreCommand;
using cli::CommandResult;
using testing::Namespaces;
using testing::RankContext;
using testing::require;

constexpr Duration kLimit = std::chrono::seconds(120);
constexpr const char* kUntilTwoAreLeft =
    "echo world $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit; exec sleep 1000";

class HostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string obstacle = Namespaces::obstacle();
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
  }

  struct Job {
    std::string endpoint = "10.77.0.1:29400";
    std::string num_hosts;
    std::string conf = "last_call_timeout=1,join_timeout=60";
    std::vector<std::string> program;
    // The /etc/hosts of each host; empty if no name is used.
    std::vector<std::string> names = {};
  };
  // What the test does with the agent of one host.
  using Act = std::function<void(int host, CadreCommand& agent)>;

  // Starts an agent on each host, and returns what each of them wrote and how it ended.
  static std::vector<std::string> run(const Namespaces& network, int num_agents, const Job& job,
                                      const Act& act = {}) {
    const auto result = testing::run_ranks_as_processes(
        num_agents,
        [&](RankContext& context) {
          const int host = context.rank;
          network.enter(host, job.names.empty() ? "" : job.names[static_cast<size_t>(host)]);
          std::vector<std::string> words = {
              "run",   "--nnodes",        job.num_hosts, "--rdzv-backend",
              "c10d",  "--rdzv-endpoint", job.endpoint,  "--rdzv-conf",
              job.conf};
          words.insert(words.end(), job.program.begin(), job.program.end());
          CadreCommand agent(std::move(words),
                             CadreCommand::Options{.environment = {{"CADRE_JOB_TOKEN", "secret"}}});
          if (act) act(host, agent);
          const CommandResult ended = agent.wait();
          context.output = format("exit {}\n{}{}", ended.exit_code, ended.output, ended.error);
          require(agent.leaves_nothing(), "processes of the job are left");
        },
        {.time_limit = kLimit});
    EXPECT_TRUE(result.ok()) << result.failures();
    std::vector<std::string> outputs;
    for (const auto& rank : result.ranks) outputs.push_back(rank.output);
    return outputs;
  }

  // Connects three hosts to each other.
  static void connect_all(Namespaces& network) {
    network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
    network.link({0, "10.78.0.1/24"}, {2, "10.78.0.2/24"});
    network.link({1, "10.79.0.1/24"}, {2, "10.79.0.2/24"});
    network.ip(2, "route add 10.77.0.1/32 via 10.78.0.1");
    network.ip(2, "route add 10.77.0.2/32 via 10.79.0.1");
    network.ip(1, "route add 10.78.0.2/32 via 10.79.0.2");
  }
};

// A program that the tests below start as a worker. It does nothing when it is run directly.
TEST(HostsTestWorker, Connects) {
  const auto system = os::make_native_system();
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kLimit));
  ASSERT_EQ(world->world_size(), 4);
  world->barrier();
  world->close(system->deadline_in(kLimit));
}

std::vector<std::string> connecting_worker() {
  return {"--nproc-per-node", "2", os::own_executable().value_or_throw(), "--gtest_brief=1",
          "--gtest_filter=HostsTestWorker.Connects"};
}

TEST_F(HostsTest, RanksConnectAlsoIfTheNameOfTheEndpointMeansLoopbackAtHome) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  const auto outputs = run(network, 2,
                           {.endpoint = "node0:29400",
                            .num_hosts = "2",
                            .program = connecting_worker(),
                            .names = {"127.0.1.1 node0\n", "127.0.1.1 node1\n10.77.0.1 node0\n"}});
  for (const std::string& output : outputs) EXPECT_TRUE(output.starts_with("exit 0\n")) << output;
}

// A worker that speaks c10d's protocol with the store of the job, as PyTorch does.
TEST(HostsTestWorker, MeetsOthersAtTheStoreByC10d) {
  const auto system = os::make_native_system();
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  const auto port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  const auto store =
      TcpStore::connect(*system,
                        {.address = {os::Address::Kind::kTcp, std::getenv("MASTER_ADDR"), port},
                         .protocol = StoreProtocol::kC10d},
                        system->deadline_in(kLimit));
  ASSERT_TRUE(store.ok()) << store.error().message();
  const Deadline deadline = system->deadline_in(kLimit);
  (*store)->set(std::string("rank") + std::getenv("RANK"), "here", deadline).value_or_throw();
  const std::vector<std::string> all = {"rank0", "rank1"};
  (*store)->wait(all, deadline).value_or_throw();
}

// The store of the job must also serve the worker of the host that does not have it.
TEST_F(HostsTest, WorkersOfAllHostsReachTheStoreByC10d) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  const auto outputs =
      run(network, 2,
          {.num_hosts = "2",
           .program = {os::own_executable().value_or_throw(), "--gtest_brief=1",
                       "--gtest_filter=HostsTestWorker.MeetsOthersAtTheStoreByC10d"}});
  for (const std::string& output : outputs) EXPECT_TRUE(output.starts_with("exit 0\n")) << output;
}

TEST_F(HostsTest, RanksConnectOverIPv6) {
  Namespaces network(2);
  network.link({0, "fd77::1/64"}, {1, "fd77::2/64"});
  const auto outputs =
      run(network, 2,
          {.endpoint = "[fd77::1]:29400", .num_hosts = "2", .program = connecting_worker()});
  for (const std::string& output : outputs) EXPECT_TRUE(output.starts_with("exit 0\n")) << output;
}

TEST_F(HostsTest, TheOthersGoOnWithoutAHostThatIsCutOff) {
  Namespaces network(3);
  connect_all(network);
  const auto outputs = run(network, 3,
                           {.num_hosts = "2:3",
                            .conf = "last_call_timeout=1,join_timeout=20,keep_alive_max_attempt=3",
                            .program = {"sh", "-c", kUntilTwoAreLeft}},
                           [&](int host, CadreCommand& agent) {
                             require(agent.wait_for("world 3"), "three hosts did not meet");
                             if (host != 2) return;
                             network.ip(2, "link set to0 down");
                             network.ip(2, "link set to1 down");
                           });
  for (const int host : {0, 1}) {
    EXPECT_TRUE(outputs[host].starts_with("exit 0\n")) << outputs[host];
    EXPECT_THAT(outputs[host], ::testing::HasSubstr("world 2"));
  }
  EXPECT_TRUE(outputs[2].starts_with("exit 1\n")) << outputs[2];
}

TEST_F(HostsTest, AHostThatWasFrozenKillsItsWorkersAndComesBack) {
  Namespaces network(3);
  connect_all(network);
  const testing::TemporaryFolder folder;
  // The workers of a world of three end when their host has been in such a world before.
  const std::string met = folder.file("$(hostname)");
  const std::string script = "echo world $WORLD_SIZE; if [ $WORLD_SIZE = 3 ]; then [ -e " + met +
                             " ] && exit; touch " + met + "; else touch " + folder.file("two") +
                             "; fi; exec sleep 1000";
  const auto outputs =
      run(network, 3,
          {.num_hosts = "2:3",
           .conf = "last_call_timeout=1,join_timeout=20,keep_alive_max_attempt=3",
           .program = {"sh", "-c", script}},
          [&](int host, CadreCommand& agent) {
            require(agent.wait_for("world 3"), "three hosts did not meet");
            if (host != 2) {
              require(agent.wait_for("world 2"), "the frozen host was not given up");
              return;
            }
            const std::vector<int> processes = agent.marked_processes();
            for (const int pid : processes) ::kill(pid, SIGSTOP);
            const auto system = os::make_native_system();
            const Deadline deadline = system->deadline_in(kLimit / 2);
            while (!std::filesystem::exists(folder.file("two")) &&
                   !deadline.has_passed(system->now())) {
              system->make_waiter()->park(system->deadline_in(std::chrono::milliseconds(50)));
            }
            for (const int pid : processes) ::kill(pid, SIGCONT);
          });
  for (const std::string& output : outputs) {
    EXPECT_TRUE(output.starts_with("exit 0\n")) << output;
    EXPECT_THAT(output, ::testing::HasSubstr("world 3"));
  }
}

}  // namespace
}  // namespace cadre
