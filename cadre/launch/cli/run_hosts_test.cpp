// Tests jobs of several agents. All agents are on this host and meet on loopback; each is a
// `cadre run` as on a host of its own.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/connect.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/launch/cli/etcd/etcd_registry.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/certificates.h"
#include "cadre/testing/core/etcd_server.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/reserved_port.h"
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
  using Variables = std::vector<std::pair<std::string, std::string>>;

  // Starts an agent whose workers run `program`.
  CadreCommand& start(Words options, Words program, std::string token = kSecret,
                      Variables variables = {}) {
    Words words = {"run"};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), program.begin(), program.end());
    variables.emplace_back("CADRE_JOB_TOKEN", std::move(token));
    agents_.push_back(std::make_unique<CadreCommand>(
        std::move(words), CadreCommand::Options{.environment = std::move(variables)}));
    return *agents_.back();
  }
  // Returns the options by which the agents that join() starts find each other.
  virtual Words rendezvous() const {
    return {"--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint()};
  }
  // Starts an agent that looks for the others.
  CadreCommand& join(const std::string& num_hosts, Words options, Words program,
                     std::string token = kSecret) {
    Words words = {"--nnodes", num_hosts, "--rdzv-conf", conf_};
    const Words found_by = rendezvous();
    words.insert(words.end(), found_by.begin(), found_by.end());
    words.insert(words.end(), options.begin(), options.end());
    return start(std::move(words), std::move(program), std::move(token));
  }
  CadreCommand& join(const std::string& num_hosts, const char* script) {
    return join(num_hosts, {}, {"sh", "-c", script});
  }

  std::string endpoint() const { return "127.0.0.1:" + port_; }

  std::string conf_ = "last_call_timeout=1,join_timeout=50";
  const testing::ReservedPort reserved_;
  const std::string port_ = reserved_.text();
  std::vector<std::unique_ptr<CadreCommand>> agents_;
};

TEST_F(RunHosts, AgentsWithDifferentNumbersOfWorkersFormOneWorld) {
  const Words program = {"sh", "-c", kRanks};
  join("2", {"--nproc-per-node", "1"}, program);
  ASSERT_TRUE(agents_[0]->wait_for("1 of 2 hosts is here\n"));
  join("2", {"--nproc-per-node", "2"}, program);
  const CommandResult first = agents_[0]->wait();
  const CommandResult second = agents_[1]->wait();
  EXPECT_EQ(first.exit_code, 0) << first.error;
  EXPECT_THAT(first.error, HasSubstr("2 of 2 hosts are here\n"));
  EXPECT_THAT(first.error, HasSubstr("round 1 starts: 2 hosts, 3 workers\n"));
  EXPECT_THAT(second.error, HasSubstr("joined job none, whose coordinator is host "));
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

// srun sets these variables; its tasks get no options about hosts.
TEST_F(RunHosts, TasksOfSrunFormOneJobWithTheirRanks) {
  const auto as_task = [&](const std::string& rank) -> Variables {
    return {{"SLURM_JOB_ID", "7"},         {"SLURM_STEP_ID", port_},
            {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"},
            {"SLURM_PROCID", rank},        {"SLURM_STEP_NODELIST", "127.0.0.[1-2]"}};
  };
  const Words program = {"sh", "-c", "echo $GROUP_RANK $TORCHELASTIC_RUN_ID"};
  start({}, program, kSecret, as_task("1"));
  start({}, program, kSecret, as_task("0"));
  EXPECT_EQ(agents_[0]->wait().output, "[1] 1 slurm-7." + port_ + "\n");
  EXPECT_EQ(agents_[1]->wait().output, "[0] 0 slurm-7." + port_ + "\n");
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

// Masks the names of hosts, too.
std::string masked_hosts(const std::string& text) {
  return std::regex_replace(masked(text), std::regex("host [^ ,]+( failed|  ?\\(epoch)"),
                            "host HOST$1");
}

TEST_F(RunHosts, AKilledWorkerIsReportedOnItsHostAndNamedByTheCoordinator) {
  const char* script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit; [ $RANK = 1 ] && kill -9 $$; sleep 1000";
  join("2", {"--max-restarts", "1"}, {"sh", "-c", script});
  ASSERT_TRUE(agents_[0]->wait_for("1 of 2 hosts is here"));
  join("2", {"--max-restarts", "1"}, {"sh", "-c", script});
  EXPECT_EQ(
      masked_hosts(agents_[0]->wait().error),
      "cadre: this host is the coordinator of job none (epoch 1)\n"
      "cadre: 1 of 2 hosts is here\n"
      "cadre: 2 of 2 hosts are here\n"
      "cadre: round 1 starts: 2 hosts, 2 workers\n"
      "cadre: round 1 ends: a worker of host HOST failed in round 1: rank 1 (pid #) ended with "
      "signal 9 (SIGKILL)\n"
      "cadre: 2 of 2 hosts are here\n"
      "cadre: round 2 starts: 2 hosts, 2 workers\n");
  EXPECT_EQ(masked_hosts(agents_[1]->wait().error),
            "cadre: looking for the coordinator of job none: this agent has just started\n"
            "cadre: joined job none, whose coordinator is host HOST (epoch 1)\n"
            "cadre: rank 1 wrote nothing\n"
            "cadre: rank 1 of 2 failed with signal 9 (SIGKILL) on HOST, pid #, after # s\n"
            "  meaning: killed from outside: by someone's kill -9, a batch system's limit, or a "
            "container's memory limit (see dmesg)\n");
  for (const auto& agent : agents_) EXPECT_TRUE(agent->leaves_nothing());
}

TEST_F(RunHosts, ACrashAndAnExceptionAreReportedWithTheirStackAndMessage) {
  for (const auto& [way, expected] :
       {std::pair("segv", "write_to"),
        std::pair("exception", "std::runtime_error: no such layer")}) {
    agents_.clear();
    const std::string script = "[ $RANK = 1 ] && exec " +
                               testing::build_path("bin/cadre_crashing_worker") + " " + way +
                               "; sleep 1000";
    join("2", {}, {"sh", "-c", script});
    ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
    join("2", {}, {"sh", "-c", script});
    EXPECT_THAT(agents_[1]->wait().error, HasSubstr(expected));
    EXPECT_THAT(agents_[0]->wait().error, HasSubstr("rank 1 (pid"));
  }
}

TEST_F(RunHosts, AStoppedWorkerIsNamedByItsHost) {
  const char* script = "[ $RANK = 1 ] && kill -STOP $$; sleep 1000";
  join("2", script);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2", script);
  EXPECT_TRUE(
      agents_[1]->wait_for("was stopped by SIGSTOP and does not run until it is continued"));
  for (const auto& agent : agents_) agent->send(SIGINT);
  for (const auto& agent : agents_) {
    EXPECT_EQ(agent->wait().exit_code, 128 + SIGINT);
    EXPECT_TRUE(agent->leaves_nothing());
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
  const char* script =
      "echo job$WORLD_SIZE $CADRE_JOB_ID; echo attempt$WORLD_SIZE $CADRE_ATTEMPT; "
      "echo world $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit; sleep 1000";
  join("2:3", script);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2:3", script);
  join("2:3", script);
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 3"));
  agents_[GetParam()]->send(SIGKILL);
  std::string survivors;  // what the agents that go on say
  std::set<std::string> jobs;
  for (size_t i = 0; i < agents_.size(); ++i) {
    const CommandResult result = agents_[i]->wait();
    EXPECT_TRUE(agents_[i]->leaves_nothing());
    if (i == GetParam()) {
      EXPECT_EQ(result.exit_code, 128 + SIGKILL);
      EXPECT_THAT(result.error, HasSubstr("`cadre run` was killed; its workers were killed too"));
      continue;
    }
    EXPECT_EQ(result.exit_code, 0) << i << ": " << result.error;
    EXPECT_THAT(result.output, HasSubstr("world 2"));
    EXPECT_NE(word_after(result.output, "job3 "), "");
    EXPECT_EQ(word_after(result.output, "job3 "), word_after(result.output, "job2 "));
    jobs.insert(word_after(result.output, "job2 "));
    EXPECT_LT(word_after(result.output, "attempt3 "), word_after(result.output, "attempt2 "));
    survivors += result.error;
  }
  EXPECT_THAT(survivors, HasSubstr(GetParam() == 0 ? "the connection to the coordinator was lost"
                                                   : "its agent has ended"));
  EXPECT_THAT(survivors, HasSubstr("starts: 2 hosts, 2 workers"));
  EXPECT_EQ(jobs.size(), 1U);
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

// The workers of an agent that is stopped run on until it is continued. Then it finds that it was
// given up, and kills them.
TEST_F(RunHosts, AStoppedAgentIsGivenUpAndTheOthersGoOn) {
  conf_ = "last_call_timeout=1,join_timeout=15";
  const char* script = "echo world $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit; exec sleep 1000";
  join("2:3", script);
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("2:3", script);
  join("2:3", script);
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 3"));
  const int stopped = agents_[2]->supervisor();
  ASSERT_GT(stopped, 0);
  ::kill(stopped, SIGSTOP);
  for (const size_t i : {0, 1}) {
    const CommandResult result = agents_[i]->wait();
    EXPECT_EQ(result.exit_code, 0) << i << ": " << result.error;
    EXPECT_THAT(result.output, HasSubstr("world 2"));
    EXPECT_TRUE(agents_[i]->leaves_nothing());
  }
  EXPECT_THAT(agents_[0]->seen().error, HasSubstr(": it was silent for too long\n"));
  ::kill(stopped, SIGCONT);
  EXPECT_EQ(agents_[2]->wait().exit_code, 1) << agents_[2]->seen().error;
  EXPECT_TRUE(agents_[2]->leaves_nothing());
}

// The rest of the hosts is no majority, and the workers of the stopped agent may still run.
TEST_F(RunHosts, WithoutAMajorityTheJobEndsWhenAnAgentIsStopped) {
  conf_ = "last_call_timeout=1,join_timeout=3";
  join("1:2", "echo world $WORLD_SIZE; exec sleep 1000");
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  join("1:2", "echo world $WORLD_SIZE; exec sleep 1000");
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("world 2"));
  const int stopped = agents_[1]->supervisor();
  ASSERT_GT(stopped, 0);
  ::kill(stopped, SIGSTOP);
  const CommandResult result = agents_[0]->wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr(": it was silent for too long\n"));
  EXPECT_THAT(result.error, HasSubstr("1 host is here, which is no majority of the hosts of the "
                                      "last round, and the others may still run"));
  EXPECT_TRUE(agents_[0]->leaves_nothing());
  ::kill(stopped, SIGCONT);
  agents_[1]->send(SIGINT);
  agents_[1]->wait();
  EXPECT_TRUE(agents_[1]->leaves_nothing());
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
  const auto port = reserved_.number();
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

// The store of torchrun's agent does so when an agent of cadre run dials it.
TEST_F(RunHosts, AnEndpointThatDoesNotAnswerIsNamed) {
  conf_ = "join_timeout=3,is_host=0";
  const auto system = os::make_native_system();
  const auto port = reserved_.number();
  const auto listener = system->listen({os::Address::Kind::kTcp, "127.0.0.1", port});
  ASSERT_TRUE(listener.ok());
  const CommandResult result = join("2", {}, {"true"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("the process at 127.0.0.1:" + port_ +
                                      " accepted the connection and did not answer"));
  EXPECT_THAT(result.error, HasSubstr("or with torchrun on all"));
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
              HasSubstr("expected c10d, static, etcd or file"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-id", "bert"}),
              HasSubstr("needs --rdzv-endpoint HOST:PORT, the address of etcd"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "file", "--rdzv-id", "bert"}),
              HasSubstr("needs --rdzv-endpoint PATH"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "node0"}),
              HasSubstr("needs --rdzv-id ID"));
  for (const char* flag : {"--master-addr", "--master-port"}) {
    EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "node0",
                          "--rdzv-id", "bert", flag, "7"}),
                HasSubstr(cadre::format("{} 7: belongs to --rdzv-backend static", flag)));
  }
  EXPECT_THAT(error_of({"--nnodes", "2", "--rdzv-backend", "file", "--rdzv-endpoint", "/tmp/x",
                        "--rdzv-id", "bert", "--rdzv-conf", "is_host=1"}),
              HasSubstr("is_host of --rdzv-conf belongs to --rdzv-backend c10d"));
  EXPECT_THAT(error_of({"--nnodes", "2", "--standalone"}), HasSubstr("one host"));
}

// The agents find each other in etcd, or in a file.
class RunRegistry : public RunHosts, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    if (is_file()) return;
    const std::string obstacle = testing::EtcdServer::obstacle();
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    server_ = std::make_unique<testing::EtcdServer>();
  }
  bool is_file() const { return GetParam() == std::string("file"); }
  Words rendezvous() const override {
    const std::string place = is_file() ? folder_.file("claim") : server_->address();
    return {"--rdzv-backend", GetParam(), "--rdzv-endpoint", place,
            "--rdzv-id",      "bert",     "--local-addr",    "127.0.0.1"};
  }
  // Returns the text in the registry; empty if there is none.
  std::string registered() const {
    if (is_file()) {
      const auto text = os::read_file(folder_.file("claim"), launch::Claim::kMaxTextBytes);
      return text.ok() ? *text : "";
    }
    const auto system = os::make_native_system();
    auto client = EtcdClient::make(*system, {.address = server_->address()}).value_or_throw();
    const auto entry =
        client.get(claim_key("bert"), system->deadline_in(kPatience)).value_or_throw();
    return entry ? entry->value : "";
  }
  // Kills all processes of an agent, so that none of them can remove the claim.
  static void kill_all(CadreCommand& agent) {
    const std::vector<int> processes = agent.marked_processes();
    for (const int pid : processes) ::kill(pid, SIGSTOP);
    for (const int pid : processes) ::kill(pid, SIGKILL);
    EXPECT_TRUE(agent.leaves_nothing());
  }
  ::testing::AssertionResult reaches(size_t agent, std::string_view text) {
    if (agents_[agent]->wait_for(text)) return ::testing::AssertionSuccess();
    auto failure = ::testing::AssertionFailure() << "no \"" << text << "\" of agent " << agent;
    for (const auto& each : agents_) failure << "\n" << each->story();
    return failure;
  }
  void let_workers_end() const { os::replace_file(folder_.file("end"), {}).value_or_throw(); }
  // Returns a script that ends in a world of so many workers when let_workers_end() was called.
  std::string ends_in_world_of(int size) const {
    return cadre::format(
        "echo world $WORLD_SIZE; while :; do [ -e {} ] && [ $WORLD_SIZE = {} ] && exit; sleep "
        "0.05; done",
        folder_.file("end"), size);
  }

  const testing::TemporaryFolder folder_;
  std::unique_ptr<testing::EtcdServer> server_;
};

TEST_P(RunRegistry, AgentsThatStartAtOnceMeetAndLeaveNothing) {
  const std::string script = ends_in_world_of(3);
  for (int i = 0; i < 3; ++i) join("3", script.c_str());
  for (size_t i = 0; i < 3; ++i) ASSERT_TRUE(reaches(i, "world 3"));
  EXPECT_THAT(registered(), HasSubstr("\"job\":\"bert\""));
  let_workers_end();
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_THAT(result.error, Not(HasSubstr("warning")));
  }
  EXPECT_EQ(registered(), "");
}

TEST_P(RunRegistry, ALateHostFindsTheSuccessorOfAKilledCoordinator) {
  const std::string script = ends_in_world_of(3);
  join("2:3", script.c_str());
  ASSERT_TRUE(reaches(0, "is the coordinator"));
  join("2:3", script.c_str());
  join("2:3", script.c_str());
  for (size_t i = 0; i < 3; ++i) ASSERT_TRUE(reaches(i, "world 3"));
  kill_all(*agents_[0]);
  for (size_t i = 1; i < 3; ++i) ASSERT_TRUE(reaches(i, "world 2"));
  let_workers_end();
  join("2:3", script.c_str());
  for (size_t i = 1; i < agents_.size(); ++i) {
    const CommandResult result = agents_[i]->wait();
    EXPECT_EQ(result.exit_code, 0) << i << ": " << result.error;
  }
  EXPECT_EQ(registered(), "");
}

TEST_P(RunRegistry, TheNextOneBecomesCoordinatorIfTheFirstDiesAlone) {
  join("2", {}, {"true"});
  ASSERT_TRUE(reaches(0, "is the coordinator"));
  kill_all(*agents_[0]);
  join("2", {}, {"true"});
  join("2", {}, {"true"});
  for (size_t i = 1; i < 3; ++i) {
    const CommandResult result = agents_[i]->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error;
  }
}

TEST_P(RunRegistry, ARegistryWithSomethingElseIsNamedAndEndsTheJob) {
  if (is_file()) {
    os::replace_file(folder_.file("claim"), wire::as_bytes("node0:29400")).value_or_throw();
  } else {
    const auto system = os::make_native_system();
    auto client = EtcdClient::make(*system, {.address = server_->address()}).value_or_throw();
    ASSERT_TRUE(
        client.put_if(claim_key("bert"), 0, "node0:29400", 0, system->deadline_in(kPatience))
            .value_or_throw());
  }
  const CommandResult result = join("2", {}, {"true"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("holds something else than the coordinator of a job, "
                                      "\"node0:29400\"; remove it, or give the job another "
                                      "--rdzv-id"));
}

INSTANTIATE_TEST_SUITE_P(Both, RunRegistry, ::testing::Values("etcd", "file"));

class RunEtcd : public RunRegistry {};

TEST_P(RunEtcd, AServerThatDoesNotAnswerAtTheStartIsNamed) {
  server_->stop();
  const CommandResult result = join("2", {}, {"true"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr(server_->address() + " does not answer"));
}

TEST_P(RunEtcd, AJobThatHasStartedDoesNotNeedTheServer) {
  const std::string script = ends_in_world_of(1);
  join("1:2", script.c_str());
  ASSERT_TRUE(reaches(0, "is the coordinator"));
  join("1:2", script.c_str());
  for (size_t i = 0; i < 2; ++i) ASSERT_TRUE(reaches(i, "world 2"));
  server_->stop();
  ASSERT_TRUE(reaches(0, "hosts that come now may not find the job"));
  kill_all(*agents_[0]);
  ASSERT_TRUE(reaches(1, "world 1"));
  ASSERT_TRUE(reaches(1, "hosts that come now may not find the job"));
  server_->start();
  ASSERT_TRUE(reaches(1, "answers again"));
  let_workers_end();
  const CommandResult result = agents_[1]->wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
}

INSTANTIATE_TEST_SUITE_P(Only, RunEtcd, ::testing::Values("etcd"));

// etcd speaks TLS and asks each client for a certificate.
class RunEtcdTls : public RunHosts {
 protected:
  void SetUp() override {
    for (const auto& obstacle :
         {testing::EtcdServer::obstacle(), testing::Certificates::obstacle()}) {
      if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    }
    const auto own = certificates_.issue("server");
    server_ = std::make_unique<testing::EtcdServer>(testing::EtcdServer::Tls{
        .authorities = authority_, .certificate = own.certificate, .private_key = own.private_key});
  }
  Words rendezvous() const override {
    return {"--rdzv-backend", "etcd", "--rdzv-endpoint", server_->address(),
            "--rdzv-id",      "bert", "--local-addr",    "127.0.0.1"};
  }
  CadreCommand& join_with(const std::string& settings) {
    conf_ = "join_timeout=50," + settings;
    return join("2", {}, {"true"});
  }
  std::string error_with(const std::string& settings) {
    const CommandResult result = join_with(settings).wait();
    EXPECT_EQ(result.exit_code, 1);
    return result.error;
  }
  static std::string text_of(const testing::Certificates::Pair& pair) {
    return cadre::format("cert={},key={}", pair.certificate, pair.private_key);
  }

  const testing::Certificates certificates_;
  const std::string& authority_ = certificates_.authority();
  std::unique_ptr<testing::EtcdServer> server_;
};

TEST_F(RunEtcdTls, AgentsMeetByTorchrunsNames) {
  const auto client = certificates_.issue("client");
  join_with(cadre::format("protocol=https,cacert={},{}", authority_, text_of(client)));
  join_with(cadre::format("protocol=https,ca_cert={},ssl_cert={},ssl_cert_key={}", authority_,
                          client.certificate, client.private_key));
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_THAT(result.error, Not(HasSubstr("warning")));
  }
}

TEST_F(RunEtcdTls, AFileThatDoesNotFitIsNamed) {
  const testing::Certificates others;
  const std::string url = "https://" + server_->address();
  const std::string own = text_of(certificates_.issue("client"));
  const auto foreign = others.issue("foreign");
  EXPECT_THAT(error_with("protocol=https," + own),
              HasSubstr("cacert=FILE (now: the authorities of this system)"));
  const std::string wrong_authority =
      error_with(cadre::format("protocol=https,cacert={},{}", others.authority(), own));
  EXPECT_THAT(wrong_authority, HasSubstr(url + " is not trusted: "));
  EXPECT_THAT(wrong_authority, HasSubstr("cacert=FILE (now: " + others.authority() + ")"));
  EXPECT_THAT(error_with(cadre::format("protocol=https,cacert=/no/such/file,{}", own)),
              HasSubstr(url + " was not called: "));
  EXPECT_THAT(error_with(cadre::format("protocol=https,cacert={}", authority_)),
              HasSubstr("--rdzv-conf cert=FILE (now: none)"));
  EXPECT_THAT(
      error_with(cadre::format("protocol=https,cacert={},{}", authority_, text_of(foreign))),
      HasSubstr("--rdzv-conf cert=FILE (now: " + foreign.certificate + ")"));
  EXPECT_THAT(error_with(own), HasSubstr("if it speaks TLS, give --rdzv-conf protocol=https"));
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
