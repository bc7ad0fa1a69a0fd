// Tests jobs of several agents. All agents are on this host and meet on loopback; each is a
// `cadre run` as on a host of its own.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/comm/connect.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kSecret = "the secret of the test";
constexpr const char* kRanks =
    "echo $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, group $GROUP_RANK of "
    "$GROUP_WORLD_SIZE, role $ROLE_RANK of $ROLE_WORLD_SIZE";

class RunHosts : public ::testing::Test {
 protected:
  using Words = std::vector<std::string>;

  // Starts an agent whose workers run `program`.
  CadreCommand& start(Words options, Words program, std::string token = kSecret) {
    Words words = {"run"};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), program.begin(), program.end());
    agents_.push_back(std::make_unique<CadreCommand>(
        std::move(words),
        CadreCommand::Options{.environment = {{"CADRE_JOB_TOKEN", std::move(token)}}}));
    return *agents_.back();
  }
  // Starts an agent that looks for the others by c10d's rendezvous.
  CadreCommand& join(const std::string& num_hosts, Words options, Words program,
                     std::string token = kSecret) {
    Words words = {"--nnodes",        num_hosts,  "--rdzv-backend", "c10d",
                   "--rdzv-endpoint", endpoint(), "--rdzv-conf",    conf_};
    words.insert(words.end(), options.begin(), options.end());
    return start(std::move(words), std::move(program), std::move(token));
  }
  CadreCommand& join(const std::string& num_hosts, const char* script) {
    return join(num_hosts, {}, {"sh", "-c", script});
  }

  std::string endpoint() const { return "127.0.0.1:" + port_; }
  static std::string free_port() {
    const auto system = os::make_native_system();
    const auto listener = system->listen({os::Address::Kind::kTcp, "127.0.0.1", 0});
    return cadre::format("{}", (*listener)->address().port);
  }

  std::string conf_ = "last_call_timeout=1,join_timeout=50";
  const std::string port_ = free_port();
  std::vector<std::unique_ptr<CadreCommand>> agents_;
};

TEST_F(RunHosts, AgentsWithDifferentNumbersOfWorkersFormOneWorld) {
  const Words program = {"sh", "-c", kRanks};
  join("2", {"--nproc-per-node", "1"}, program);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2", {"--nproc-per-node", "2"}, program);
  const CommandResult first = agents_[0]->wait();
  const CommandResult second = agents_[1]->wait();
  EXPECT_EQ(first.exit_code, 0) << first.error;
  EXPECT_EQ(second.exit_code, 0) << second.error;
  EXPECT_EQ(first.output, "[0] 0 of 3, local 0 of 1, group 0 of 2, role 0 of 3\n");
  EXPECT_THAT(second.output, HasSubstr("[1] 1 of 3, local 0 of 2, group 1 of 2, role 1 of 3\n"));
  EXPECT_THAT(second.output, HasSubstr("[2] 2 of 3, local 1 of 2, group 1 of 2, role 2 of 3\n"));
  EXPECT_TRUE(agents_[0]->leaves_nothing());
}

TEST_F(RunHosts, ANodeHasTheRankThatTheUserGave) {
  const Words program = {"sh", "-c", "echo $GROUP_RANK"};
  const auto with_rank = [&](const std::string& rank) -> Words {
    return {"--nnodes",      "3",         "--node-rank",   rank,
            "--master-addr", "127.0.0.1", "--master-port", port_};
  };
  start(with_rank("2"), program);
  start(with_rank("1"), program);
  start(with_rank("0"), program);
  EXPECT_EQ(agents_[0]->wait().output, "[2] 2\n");
  EXPECT_EQ(agents_[1]->wait().output, "[1] 1\n");
  EXPECT_EQ(agents_[2]->wait().output, "[0] 0\n");
}

TEST_F(RunHosts, TwoNodesWithOneRankAreNamed) {
  const auto with_rank = [&](const std::string& rank) -> Words {
    return {"--nnodes",      "3",         "--node-rank",   rank,
            "--master-addr", "127.0.0.1", "--master-port", port_};
  };
  for (const char* rank : {"0", "1", "1"}) start(with_rank(rank), {"true"});
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.error, HasSubstr("both have --node-rank 1"));
  }
}

// Returns the word that follows `mark` in the text; empty if there is none.
std::string word_after(const std::string& text, const std::string& mark) {
  const size_t begin = text.find(mark);
  if (begin == std::string::npos) return "";
  return text.substr(begin + mark.size(),
                     text.find_first_of(" \n", begin + mark.size()) - begin - mark.size());
}

// Each round has a store of its own, and all hosts know its port.
TEST_F(RunHosts, AFailedWorkerRestartsTheWorkersOfAllHosts) {
  const char* script =
      "echo restart $TORCHELASTIC_RESTART_COUNT; echo port$TORCHELASTIC_RESTART_COUNT "
      "$MASTER_PORT; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit; [ $RANK = 1 ] && exit 3; sleep 1000";
  for (int i = 0; i < 2; ++i) join("2", {"--max-restarts", "1"}, {"sh", "-c", script});
  std::vector<std::string> outputs;
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_THAT(result.output, HasSubstr("restart 0\n"));
    EXPECT_THAT(result.output, HasSubstr("restart 1\n"));
    outputs.push_back(result.output);
  }
  for (const std::string mark : {"port0 ", "port1 "}) {
    const std::string port = word_after(outputs[0], mark);
    EXPECT_TRUE(port != "" && port != "0") << outputs[0];
    EXPECT_EQ(word_after(outputs[1], mark), port);
  }
}

TEST_F(RunHosts, WithoutARestartLeftAllHostsEndAndSayWhichWorkerFailed) {
  for (int i = 0; i < 2; ++i) join("2", "[ $RANK = 1 ] && exit 3; sleep 1000");
  int num_own = 0;
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    num_own += result.exit_code == 3 ? 1 : 0;
    EXPECT_TRUE(result.exit_code == 3 || result.exit_code == 1) << result.exit_code;
    EXPECT_THAT(result.error, HasSubstr("rank 1 (pid"));
    EXPECT_THAT(result.error, HasSubstr("exit code 3; 0 of 0 restarts were used"));
  }
  EXPECT_EQ(num_own, 1);  // the host of the worker
}

// Every agent in turn is killed; the first one serves the store and is at the endpoint.
class RunHostsKilled : public RunHosts, public ::testing::WithParamInterface<size_t> {};

TEST_P(RunHostsKilled, TheOthersGoOnInASmallerWorld) {
  const char* script = "echo world $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit; sleep 1000";
  join("2:3", script);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2:3", script);
  join("2:3", script);
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 3"));
  agents_[GetParam()]->send(SIGKILL);
  for (size_t i = 0; i < agents_.size(); ++i) {
    const CommandResult result = agents_[i]->wait();
    EXPECT_TRUE(agents_[i]->leaves_nothing());
    if (i == GetParam()) continue;
    EXPECT_EQ(result.exit_code, 0) << i << ": " << result.error;
    EXPECT_THAT(result.output, HasSubstr("world 2"));
  }
}

INSTANTIATE_TEST_SUITE_P(EachAgent, RunHostsKilled, ::testing::Values(0, 1, 2));

TEST_F(RunHosts, AHostThatComesLaterGetsAPlaceInTheNextRound) {
  const char* script = "echo world $WORLD_SIZE; [ $WORLD_SIZE = 3 ] && exit; sleep 1000";
  join("2:3", script);
  join("2:3", script);
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 2"));
  join("2:3", script);
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_THAT(result.output, HasSubstr("world 3"));
  }
}

TEST_F(RunHosts, CtrlCAtOneHostLetsTheOthersGoOn) {
  const char* script = "echo world $WORLD_SIZE; [ $WORLD_SIZE = 1 ] && exit; exec sleep 1000";
  join("1:2", script);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("1:2", script);
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 2"));
  agents_[1]->send(SIGINT);
  EXPECT_EQ(agents_[1]->wait().exit_code, 128 + SIGINT);
  const CommandResult result = agents_[0]->wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("world 1"));
}

TEST_F(RunHosts, AnAgentWithAnotherTokenIsRefused) {
  conf_ = "last_call_timeout=1,join_timeout=3";
  join("2", {}, {"true"});
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2", {}, {"true"}, "another secret");
  const CommandResult stranger = agents_[1]->wait();
  EXPECT_EQ(stranger.exit_code, 1);
  EXPECT_THAT(stranger.error, HasSubstr("has another job token than"));
  const CommandResult first = agents_[0]->wait();
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_THAT(first.error, HasSubstr("connection from tcp:127.0.0.1"));
  EXPECT_THAT(first.error, HasSubstr("has another job token than"));
  EXPECT_THAT(first.error, HasSubstr("only 1 of at least 2 hosts came within 3 s"));
}

TEST_F(RunHosts, TorchrunIsToldToUseOneLauncherOnAllHosts) {
  conf_ = "last_call_timeout=1,join_timeout=3";
  join("2", {}, {"true"});
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  const auto system = os::make_native_system();
  const auto port = static_cast<uint16_t>(std::stoi(port_));
  const auto socket =
      system->connect({os::Address::Kind::kTcp, "127.0.0.1", port}, system->deadline_in(kPatience));
  ASSERT_TRUE(socket.ok());
  // What a client of c10d's TCPStore sends first.
  constexpr std::array kValidate = {std::byte{0}, std::byte{0xce}, std::byte{0xf7}, std::byte{0x85},
                                    std::byte{0x3c}};
  ASSERT_EQ(*(*socket)->try_send(kValidate), kValidate.size());
  EXPECT_TRUE(agents_[0]->wait_for("it speaks the protocol of c10d's TCPStore"));
  agents_[0]->wait();
}

TEST_F(RunHosts, AJobWithoutASecretSaysSo) {
  const CommandResult result =
      join("2", {"--rdzv-id", "bert", "--rdzv-conf", "join_timeout=1"}, {"true"}, "").wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("warning: the job has no secret"));
  EXPECT_THAT(result.error, HasSubstr("\"bert\""));
}

TEST_F(RunHosts, OptionsThatDoNotFitAreRefused) {
  const auto error_of = [](Words options) {
    options.insert(options.begin(), "run");
    options.push_back("true");
    const CommandResult result = run_cadre(options);
    EXPECT_EQ(result.exit_code, 2);
    return result.error;
  };
  EXPECT_THAT(error_of({"--nnodes", "2"}), HasSubstr("needs --master-addr HOST"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "c10d"}),
              HasSubstr("needs --rdzv-endpoint HOST:PORT"));
  EXPECT_THAT(error_of({"--nnodes", "1:2", "--master-addr", "127.0.0.1"}),
              HasSubstr("needs --rdzv-backend c10d"));
  EXPECT_THAT(error_of({"--nnodes", "3:2"}), HasSubstr("expected a number of hosts"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--node-rank", "2"}), HasSubstr("a number below 2"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-conf", "join_timeout=x"}),
              HasSubstr("a whole number of seconds"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-conf", "on_half=maybe"}),
              HasSubstr("stop or continue"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "zeus"}),
              HasSubstr("expected c10d or static"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--standalone"}), HasSubstr("one host"));
}

// A program that the test below starts as a worker. It does nothing when it is run directly.
TEST(RunHostsWorker, ReducesOverAllHosts) {
  const auto system = os::make_native_system();
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  ASSERT_EQ(world->world_size(), 4);
  world->barrier();
  world->close(system->deadline_in(kPatience));
}

TEST_F(RunHosts, RanksOfAllHostsConnectToOneGroup) {
  const Words program = {os::own_executable().value_or_throw(), "--gtest_brief=1",
                         "--gtest_filter=RunHostsWorker.ReducesOverAllHosts"};
  for (int i = 0; i < 2; ++i) join("2", {"--nproc-per-node", "2"}, program);
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  }
}

}  // namespace
}  // namespace cadre::cli
