// Tests the recovery in the same processes: ranks that wait for a new membership keep their process
// when another rank fails, and the others get new ones.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/recovery/recovery.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/wire/recovery/recovery_files.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/reserved_port.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kTestFolder = "CADRE_TEST_FOLDER";
constexpr int64_t kNumRecoverySteps = 40;

bool is_recovery_worker() {
  return read_job_environment().value_or_throw().is_launched && std::getenv(kTestFolder) != nullptr;
}

std::string environment_of(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What the workers of the tests below do: steps that sum a number over all ranks. Each line of the
// output ends with the pid.
class RecoveringRank {
 public:
  RecoveringRank() : recovery_(*system_, {.comes_within = std::chrono::seconds(10)}) {}

  os::System& system() { return *system_; }
  Recovery& recovery() { return recovery_; }
  std::optional<int64_t> step() const { return step_; }

  std::unique_ptr<Communicator> connect() {
    return connect_from_environment(*system_, {.timeout = std::chrono::seconds(20)},
                                    system_->deadline_in(kPatience));
  }
  JobPosition wait() { return recovery_.wait_for_membership(system_->deadline_in(kPatience)); }
  void nap() { system_->poll({}, system_->deadline_in(std::chrono::milliseconds(2))); }

  // Gets the newest state, or begins anew, and says so.
  void synchronize(Communicator& group) {
    const auto newest = find_newest_state(group, step_);
    const std::string source =
        newest ? cadre::format("from rank {} at step {}", newest->rank, newest->step) : "anew";
    say(cadre::format("rank {} of {} starts {}, attempt {}", group.rank(), group.world_size(),
                      source, read_job_environment().value_or_throw().restart_count));
    if (newest) {
      const std::array parts{std::as_writable_bytes(std::span(&total_, 1))};
      EXPECT_EQ(broadcast_newest_state(group, step_, parts), *newest);
      step_ = newest->step;
    } else {
      step_ = 0;
    }
  }

  // Runs the rest of the steps. `fail` is called before each.
  void train(Communicator& group, const std::function<void(int64_t)>& fail) {
    while (*step_ < kNumRecoverySteps) {
      fail(*step_);
      const int64_t mine = 1;
      int64_t sum = 0;
      group.all_reduce(std::as_bytes(std::span(&mine, 1)),
                       std::as_writable_bytes(std::span(&sum, 1)), DType::kInt64, ReduceOp::kSum);
      total_ += sum / group.world_size();
      ++*step_;
      nap();
    }
    group.close(system_->deadline_in(kPatience));
    say(cadre::format("total {}", total_));
  }

  // The program of a user: recovers until all steps are done.
  void run(const std::function<void(int64_t)>& fail) {
    while (true) {
      try {
        const auto group = connect();
        synchronize(*group);
        return train(*group, fail);
      } catch (const Error& error) {
        if (!recovery_.can_recover(error)) throw;
      }
      wait();
    }
  }

  static void say(const std::string& text) {
    std::printf("%s, pid %d\n", text.c_str(), static_cast<int>(::getpid()));
    std::fflush(stdout);
  }

 private:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  Recovery recovery_;
  std::optional<int64_t> step_;
  int64_t total_ = 0;
};

bool is_first_attempt() {
  return environment_of("TORCHELASTIC_RESTART_COUNT") == "0";
}

// The tests named RunRecoveryWorker are programs that the tests below start as workers. They do
// nothing when they are run directly.
TEST(RunRecoveryWorker, ThePidOfTheCulpritIsKilled) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  rank_program.run([&](int64_t step) {
    if (is_first_attempt() && environment_of("RANK") == "1" && step == 10)
      ::kill(::getpid(), SIGKILL);
  });
}

// Another rank is killed in each attempt, also one that has survived before.
TEST(RunRecoveryWorker, EachRankIsKilledInTurn) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  rank_program.run([&](int64_t step) {
    const int attempt = read_job_environment().value_or_throw().restart_count;
    const int rank = std::atoi(environment_of("RANK").c_str());
    if (attempt == rank && step == 10 * (attempt + 1)) ::kill(::getpid(), SIGKILL);
  });
}

void say_in_recovery_file(const std::string& text) {
  std::ofstream(environment_of("CADRE_RECOVERY_FILE")) << "cadre-recovery 1\n" << text;
}

// Rank 0 never waits: it ends with exit code 0 or 3, or runs on. Rank 1 is killed.
TEST(RunRecoveryWorker, OneRankDoesNotWait) {
  if (!is_recovery_worker()) return;
  const std::string manner = environment_of("CADRE_TEST_MANNER");
  const int rank = std::atoi(environment_of("RANK").c_str());
  RecoveringRank rank_program;
  try {
    const auto group = rank_program.connect();
    rank_program.synchronize(*group);
    rank_program.train(*group, [&](int64_t step) {
      if (!is_first_attempt() || step != 10) return;
      if (rank == 1) ::kill(::getpid(), SIGKILL);
    });
    return;
  } catch (const Error& error) {
    if (rank == 0 && is_first_attempt()) {
      if (manner == "exit-0") std::_Exit(0);
      if (manner == "exit-3") std::_Exit(3);
      if (manner == "another-membership") {
        say_in_recovery_file("state waiting\nmemberships 1\ncomes-within-ms 3000\n");
      }
      while (true) rank_program.nap();
    }
  }
  rank_program.wait();
  rank_program.run([](int64_t) {});
}

TEST(RunRecoveryWorker, DiesWhileItWaits) {
  if (!is_recovery_worker()) return;
  const int rank = std::atoi(environment_of("RANK").c_str());
  RecoveringRank rank_program;
  if (rank == 2 && is_first_attempt()) {
    // The file says that this rank waits, and the rank is killed.
    auto group = rank_program.connect();
    rank_program.synchronize(*group);
    group.reset();
    say_in_recovery_file("state waiting\nmemberships 0\ncomes-within-ms 20000\n");
    ::kill(::getpid(), SIGKILL);
  }
  rank_program.run([](int64_t) {});
}

// Rank 1 is killed in a step, and its successor before it connects.
TEST(RunRecoveryWorker, DiesAgainBeforeItConnects) {
  if (!is_recovery_worker()) return;
  const bool is_successor = environment_of("TORCHELASTIC_RESTART_COUNT") == "1";
  if (is_successor && environment_of("RANK") == "1") ::kill(::getpid(), SIGKILL);
  RecoveringRank rank_program;
  rank_program.run([&](int64_t step) {
    if (is_first_attempt() && environment_of("RANK") == "1" && step == 10) {
      ::kill(::getpid(), SIGKILL);
    }
  });
}

TEST(RunRecoveryWorker, WaitsThoughNothingHasFailed) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  try {
    rank_program.recovery().wait_for_membership(
        rank_program.system().deadline_in(std::chrono::milliseconds(200)));
  } catch (const Error& error) {
    RecoveringRank::say(error.what());
  }
  rank_program.run([](int64_t) {});
}

TEST(RunRecoveryWorker, WaitsForAnHour) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  RecoveringRank::say("waits");
  rank_program.recovery().wait_for_membership(
      rank_program.system().deadline_in(std::chrono::hours(1)));
}

// Rank 1 is killed; the others keep the failed group while they connect the next one.
TEST(RunRecoveryWorker, KeepsTheOldGroup) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  const auto old = rank_program.connect();
  if (old->rank() == 1 && is_first_attempt()) ::kill(::getpid(), SIGKILL);
  if (is_first_attempt()) {
    EXPECT_THROW(old->barrier(), Error);
    rank_program.wait();
    const auto group = rank_program.connect();
    group->barrier();
    EXPECT_THROW(old->barrier(), Error);
    group->close(rank_program.system().deadline_in(kPatience));
  } else {
    old->barrier();
    old->close(rank_program.system().deadline_in(kPatience));
  }
  if (::testing::Test::HasFailure()) std::_Exit(4);
  RecoveringRank::say("done");
}

// Rank 1 is killed before the first step, so no rank has a state.
TEST(RunRecoveryWorker, NoRankHasAState) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  const auto group = rank_program.connect();
  int64_t value = 7;
  const std::array parts{std::as_writable_bytes(std::span(&value, 1))};
  try {
    broadcast_newest_state(*group, std::nullopt, parts);
  } catch (const Error& error) {
    RecoveringRank::say(error.what());
  }
  const bool is_odd = group->rank() == 1;
  try {
    broadcast_newest_state(*group, 5, std::span(parts).first(is_odd ? 0 : 1));
  } catch (const Error& error) {
    RecoveringRank::say(error.what());
  }
  EXPECT_EQ(value, 7);
  value = group->rank();
  const int64_t own_step = group->rank() == 0 ? 3 : 5;  // ranks 1 and 2 have the newest state
  const NewestState newest = broadcast_newest_state(*group, own_step, parts);
  EXPECT_EQ(newest, (NewestState{.rank = 1, .step = 5}));
  EXPECT_EQ(value, 1);
  group->close(rank_program.system().deadline_in(kPatience));
  if (::testing::Test::HasFailure()) std::_Exit(4);
}

class RunRecovery : public ::testing::Test {
 protected:
  using Words = std::vector<std::string>;

  static Words program(const std::string& worker) {
    return {os::own_executable().value_or_throw(), "--gtest_brief=1",
            "--gtest_filter=RunRecoveryWorker." + worker};
  }
  static Words job(int num_workers, const std::string& worker, const Words& options) {
    Words words{"run", "--nproc-per-node", cadre::format("{}", num_workers)};
    words.insert(words.end(), options.begin(), options.end());
    const Words last = program(worker);
    words.insert(words.end(), last.begin(), last.end());
    return words;
  }
  CadreCommand::Options environment(const std::string& manner = "") const {
    return {.environment = {{kTestFolder, folder_.path().string()},
                            {"CADRE_TEST_MANNER", manner},
                            {"CADRE_JOB_TOKEN", "the secret of the test"}}};
  }
  // Returns the pids of the lines of the output that have `text`.
  static std::set<int> pids_of(const std::string& output, const std::string& text) {
    std::set<int> pids;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      const size_t at = line.find(", pid ");
      if (at == std::string::npos || line.find(text) == std::string::npos) continue;
      pids.insert(std::atoi(line.c_str() + at + 6));
    }
    return pids;
  }
  static int pid_of(const std::string& output, const std::string& text) {
    const std::set<int> pids = pids_of(output, text);
    EXPECT_EQ(pids.size(), 1u) << text << "\n" << output;
    return pids.empty() ? 0 : *pids.begin();
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(RunRecovery, SurvivorsKeepTheirProcessesAndTheDeadRankGetsANewOne) {
  CadreCommand command(job(3, "ThePidOfTheCulpritIsKilled", {"--max-restarts", "1"}),
                       environment());
  const CommandResult result = command.wait();
  ASSERT_EQ(result.exit_code, 0) << result.error << result.output;
  for (const int rank : {0, 1, 2}) {
    const std::string prefix = cadre::format("[{}] rank {} of 3 starts ", rank, rank);
    const int before = pid_of(result.output, prefix + "anew, attempt 0");
    const int after = pid_of(result.output, prefix + "from rank 0 at step 10, attempt 1");
    EXPECT_EQ(before == after, rank != 1) << result.output;
  }
  // Each rank has done or received all steps.
  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(result.output,
                HasSubstr(cadre::format("[{}] total {}, pid", rank, kNumRecoverySteps)));
  }
  EXPECT_THAT(result.error, HasSubstr("cadre: restart 1 of 1: starting 1 worker again; ranks 0, 2 "
                                      "stay running\n"));
  EXPECT_THAT(result.error, HasSubstr("succeeded after 1 restart"));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunRecovery, ARankThatHasSurvivedMayFailNext) {
  CadreCommand command(job(3, "EachRankIsKilledInTurn", {"--max-restarts", "3"}), environment());
  const CommandResult result = command.wait();
  ASSERT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_THAT(result.error, HasSubstr("; ranks 0-1 stay running\n"));
  EXPECT_EQ(pids_of(result.output, "total 40").size(), 3u) << result.output;
  EXPECT_EQ(pids_of(result.output, "starts").size(), 6u) << result.output;
  EXPECT_TRUE(command.leaves_nothing());
}

// A job without a restart left ends as before, also for ranks that would wait.
TEST_F(RunRecovery, WithoutARestartLeftTheSurvivorsAreStopped) {
  CadreCommand command(job(3, "EachRankIsKilledInTurn", {"--max-restarts", "1"}), environment());
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL) << result.error << result.output;
  EXPECT_THAT(result.error, HasSubstr("failed after 1 restart"));
  EXPECT_TRUE(command.leaves_nothing());
}

// Rank 0 does not wait, in each of these manners. It gets a new process, and rank 2 keeps its own.
class RunRecoveryManner : public RunRecovery, public ::testing::WithParamInterface<std::string> {};

TEST_P(RunRecoveryManner, OnlyRanksThatWaitAreKept) {
  CadreCommand command(job(3, "OneRankDoesNotWait", {"--max-restarts", "1"}),
                       environment(GetParam()));
  if (GetParam() == "runs-on" || GetParam() == "another-membership") {
    // It is stopped when the time that it has named is over.
    ASSERT_TRUE(command.wait_for("waiting for rank 0 to come to wait for the new membership"));
  }
  const CommandResult result = command.wait();
  ASSERT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_THAT(result.error, HasSubstr("starting 2 workers again; rank 2 stays running\n"));
  const std::string prefix = "[2] rank 2 of 3 starts ";
  EXPECT_EQ(pid_of(result.output, prefix + "anew"), pid_of(result.output, prefix + "from rank 2"));
  EXPECT_EQ(pids_of(result.output, "total 40").size(), 3u) << result.output;
  EXPECT_TRUE(command.leaves_nothing());
}

INSTANTIATE_TEST_SUITE_P(Manners, RunRecoveryManner,
                         ::testing::Values("exit-0", "exit-3", "runs-on", "another-membership"));

TEST_F(RunRecovery, ARankThatDiesWhileItWaitsGetsANewProcess) {
  CadreCommand command(job(3, "DiesWhileItWaits", {"--max-restarts", "1"}), environment());
  const CommandResult result = command.wait();
  ASSERT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_THAT(result.error, HasSubstr("starting 1 worker again; ranks 0-1 stay running\n"));
}

TEST_F(RunRecovery, SurvivorsOutliveASecondFailureWhileTheyConnect) {
  CadreCommand command(job(3, "DiesAgainBeforeItConnects", {"--max-restarts", "2"}), environment());
  const CommandResult result = command.wait();
  ASSERT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_THAT(result.error, HasSubstr("restart 2 of 2: starting 1 worker again"));
  for (const int rank : {0, 2}) {
    const std::string prefix = cadre::format("[{}] rank {} of 3 starts ", rank, rank);
    EXPECT_EQ(pid_of(result.output, prefix + "anew, attempt 0"),
              pid_of(result.output, prefix + "from rank 0 at step 10, attempt 2"));
  }
}

TEST_F(RunRecovery, AWaitEndsAtItsDeadlineIfNothingHasFailed) {
  CadreCommand command(job(2, "WaitsThoughNothingHasFailed", {"--max-restarts", "1"}),
                       environment());
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_EQ(pids_of(result.output, "the launcher has given no new membership").size(), 2u);
  EXPECT_THAT(result.error, Not(HasSubstr("restart")));
}

TEST_F(RunRecovery, RanksThatWaitEndWithTheLauncher) {
  CadreCommand command(job(2, "WaitsForAnHour", {"--max-restarts", "1"}), environment());
  ASSERT_TRUE(command.wait_for("[0] waits") && command.wait_for("[1] waits"));
  command.send(SIGKILL);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunRecovery, CtrlCStopsRanksThatWait) {
  CadreCommand command(job(2, "WaitsForAnHour", {"--max-restarts", "1"}), environment());
  ASSERT_TRUE(command.wait_for("[0] waits") && command.wait_for("[1] waits"));
  command.send(SIGINT);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGINT);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunRecovery, AGroupOfTheLastMembershipStaysFailed) {
  CadreCommand command(job(3, "KeepsTheOldGroup", {"--max-restarts", "1"}), environment());
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_EQ(pids_of(result.output, "done").size(), 3u);
  EXPECT_THAT(result.error, HasSubstr("starting 1 worker again; ranks 0, 2 stay running\n"));
}

TEST_F(RunRecovery, AStateThatNoRankHasIsAnErrorOnAllRanks) {
  CadreCommand command(job(3, "NoRankHasAState", {}), environment());
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error << result.output;
  EXPECT_EQ(pids_of(result.output, "none of the 3 ranks has a state").size(), 3u);
  EXPECT_EQ(pids_of(result.output, "rank 0 passes 1 parts and rank 1 passes 0").size(), 3u);
}

// A shell cannot wait, so nothing changes for it, and the job does not wait for it.
TEST_F(RunRecovery, AProgramThatDoesNotKnowRecoveryIsRestartedAtOnce) {
  CadreCommand command(
      {"run", "--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c",
       "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit; [ $RANK = 1 ] && exit 3; exec sleep 1000"},
      environment());
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.error, HasSubstr("restart 1 of 1: starting 2 workers again\n"));
}

// Two agents with two workers each.
class RunRecoveryHosts : public RunRecovery {
 protected:
  void start(const std::string& num_hosts, const std::string& worker, const Words& options = {}) {
    Words words{"--nnodes",        num_hosts,
                "--rdzv-backend",  "c10d",
                "--rdzv-endpoint", "127.0.0.1:" + port_.text(),
                "--rdzv-conf",     "last_call_timeout=5,join_timeout=50"};
    words.insert(words.end(), options.begin(), options.end());
    agents_.push_back(std::make_unique<CadreCommand>(job(2, worker, words), environment()));
  }

  const testing::ReservedPort port_;
  std::vector<std::unique_ptr<CadreCommand>> agents_;
};

TEST_F(RunRecoveryHosts, SurvivorsOfAllHostsKeepTheirProcesses) {
  start("2", "ThePidOfTheCulpritIsKilled", {"--max-restarts", "1"});
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  start("2", "ThePidOfTheCulpritIsKilled", {"--max-restarts", "1"});
  std::string output;
  for (const auto& agent : agents_) {
    const CommandResult result = agent->wait();
    EXPECT_EQ(result.exit_code, 0) << result.error << result.output;
    output += result.output;
    EXPECT_TRUE(agent->leaves_nothing());
  }
  for (const int rank : {0, 1, 2, 3}) {
    const std::string prefix = cadre::format("[{}] rank {} of 4 starts ", rank, rank);
    const int before = pid_of(output, prefix + "anew, attempt 0");
    const int after = pid_of(output, prefix + "from rank 0 at step 10, attempt 1");
    EXPECT_EQ(before == after, rank != 1) << output;
  }
}

// A host is lost with its agent, also the coordinator's. The other one goes on in a smaller world,
// with its processes.
class RunRecoveryLostHost : public RunRecoveryHosts,
                            public ::testing::WithParamInterface<size_t> {};

TEST_P(RunRecoveryLostHost, TheOtherHostGoesOnInASmallerWorld) {
  start("1:2", "TrainsUntilItIsAlone");
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  start("1:2", "TrainsUntilItIsAlone");
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("of 4 starts anew"));
  agents_[GetParam()]->send(SIGKILL);
  EXPECT_TRUE(agents_[GetParam()]->leaves_nothing());
  CadreCommand& other = *agents_[1 - GetParam()];
  const CommandResult result = other.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error << result.output;
  const std::set<int> before = pids_of(result.output, "of 4 starts anew");
  EXPECT_EQ(before.size(), 2u) << result.output;
  EXPECT_EQ(pids_of(result.output, "of 2 starts from"), before) << result.output << result.error;
}

INSTANTIATE_TEST_SUITE_P(EachHost, RunRecoveryLostHost, ::testing::Values(0, 1));

TEST(RunRecoveryWorker, NeverComesToWaitAndIgnoresSIGTERM) {
  if (!is_recovery_worker()) return;
  ::signal(SIGTERM, SIG_IGN);
  RecoveringRank rank_program;
  const auto group = rank_program.connect();
  rank_program.synchronize(*group);
  while (true) rank_program.nap();
}

// Workers that can wait have until the end of the old lease, 5 s. A signal to the launcher gives
// them no more time, because another round may start elsewhere then.
TEST_F(RunRecoveryHosts, AStopDoesNotOutlastTheLease) {
  start("1:2", "NeverComesToWaitAndIgnoresSIGTERM");
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  start("1:2", "NeverComesToWaitAndIgnoresSIGTERM");
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("of 4 starts anew"));
  agents_[0]->send(SIGKILL);
  EXPECT_TRUE(agents_[0]->leaves_nothing());
  ASSERT_TRUE(agents_[1]->wait_for("this host is the coordinator"));
  agents_[1]->send(SIGTERM);
  const CommandResult result = agents_[1]->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.error;
  EXPECT_THAT(result.error, HasSubstr("killed, because they did not end within "));
  EXPECT_THAT(result.error, Not(HasSubstr("within 30 s of SIGTERM")));
}

TEST(RunRecoveryWorker, WaitsAndSavesWhenItIsStopped) {
  if (!is_recovery_worker()) return;
  ::signal(SIGTERM, [](int) {
    ::usleep(200'000);  // the state is saved
    static constexpr std::string_view kSaved = "saved\n";
    _exit(::write(STDOUT_FILENO, kSaved.data(), kSaved.size()) < 0 ? 1 : 0);
  });
  RecoveringRank rank_program;
  try {
    const auto group = rank_program.connect();
    rank_program.synchronize(*group);
    while (true) group->barrier();
  } catch (const Error& error) {
    RecoveringRank::say("waits");
  }
  rank_program.wait();
}

// The lease limits only the time in which workers come to wait. The job needs two hosts.
TEST_F(RunRecoveryHosts, RanksThatWaitHaveTheWholeGraceWhenTheJobEnds) {
  start("2", "WaitsAndSavesWhenItIsStopped");
  ASSERT_TRUE(agents_[0]->wait_for("is the coordinator"));
  start("2", "WaitsAndSavesWhenItIsStopped");
  for (const auto& agent : agents_) ASSERT_TRUE(agent->wait_for("of 4 starts anew"));
  agents_[0]->send(SIGKILL);
  ASSERT_TRUE(agents_[1]->wait_for("this host is the coordinator"));
  for (const char* rank : {"[2] waits", "[3] waits"}) ASSERT_TRUE(agents_[1]->wait_for(rank));
  ::usleep(5'500'000);  // longer than the lease, and than the launcher tries to kill workers
  agents_[1]->send(SIGTERM);
  const CommandResult result = agents_[1]->wait();
  EXPECT_THAT(result.output, HasSubstr("[2] saved\n")) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[3] saved\n")) << result.error;
  EXPECT_THAT(result.error, Not(HasSubstr("killed, because")));
  EXPECT_TRUE(agents_[0]->leaves_nothing());
}

TEST(RunRecoveryWorker, StartsAndDoesNothing) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  const auto group = rank_program.connect();
  rank_program.synchronize(*group);
  while (true) rank_program.nap();
}

// Two of five hosts are frozen. The coordinator notices the one after the other.
TEST_F(RunRecoveryHosts, EachOfSeveralLostHostsIsNamed) {
  for (int host = 0; host < 5; ++host) {
    start("1:5", "StartsAndDoesNothing", {"--log-dir", folder_.file("logs")});
    ASSERT_TRUE(agents_.back()->wait_for(host == 0 ? "is the coordinator" : "joined job"));
  }
  for (size_t host = 0; host < agents_.size(); ++host) {
    ASSERT_TRUE(agents_[host]->wait_for(cadre::format("rank {} of 10 starts anew", 2 * host)));
  }
  for (const size_t host : {3, 4}) {
    for (const int pid : agents_[host]->marked_processes()) ::kill(pid, SIGSTOP);
  }
  const auto num_complete = [&] {
    size_t count = 0;
    for (const auto& agent : agents_) {
      for (const auto& entry :
           std::filesystem::recursive_directory_iterator(agent->temporary_folder())) {
        const std::string path = entry.path();
        if (!path.ends_with(kLostRanksFileSuffix)) continue;
        const auto content = os::read_file(path, kMaxLostRanksFileBytes);
        const auto file = content.ok() ? parse_lost_ranks_file(*content) : std::nullopt;
        if (file && file->ranks == std::vector<RankRange>{{6, 7}, {8, 9}}) ++count;
      }
    }
    return count;
  };
  const auto system = os::make_native_system();
  const Deadline patience = system->deadline_in(kPatience);
  while (num_complete() < 6 && !patience.has_passed(system->now())) ::usleep(20'000);
  EXPECT_EQ(num_complete(), 6U) << "files of the survivors";
  for (const auto& agent : agents_) {
    for (const int pid : agent->marked_processes()) ::kill(pid, SIGKILL);
  }
  for (const auto& agent : agents_) EXPECT_TRUE(agent->leaves_nothing());
}

// The ranks meet in round 1 until one is lost, and come to wait when the test lets them. Rank 1 is
// killed if there is a file that says so. Then rank 0, which is on the same host, comes at once,
// because the agent of a host reports a failure after that.
TEST(RunRecoveryWorker, ComesToWaitWhenTheTestLetsIt) {
  if (!is_recovery_worker()) return;
  const std::filesystem::path folder = environment_of(kTestFolder);
  const std::string rank = environment_of("RANK");
  const auto there_is = [&](const char* name) { return std::filesystem::exists(folder / name); };
  RecoveringRank rank_program;
  std::unique_ptr<Communicator> group = rank_program.connect();
  rank_program.synchronize(*group);
  const bool is_in_round_1 = group->world_size() == 4 && !there_is("wait");
  try {
    while (is_in_round_1) {
      if (rank == "1" && there_is("kill")) ::kill(::getpid(), SIGKILL);
      group->barrier();
      rank_program.nap();
    }
  } catch (const Error& error) {
    group.reset();
    while (!there_is("wait") && !(rank == "0" && there_is("kill"))) rank_program.nap();
    rank_program.wait();
    group = rank_program.connect();
    rank_program.synchronize(*group);
  }
  group->close(rank_program.system().deadline_in(kPatience));
}

// Two hosts run and a third one is spare. How round 1 ends: the second host's agent is killed, it
// gets Ctrl-C, or a worker of the first host fails.
class RunRecoverySpareHost : public RunRecoveryHosts,
                             public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    for (const char* has_joined : {"is the coordinator", "of 4 starts anew", "joined job none"}) {
      start("1:2", "ComesToWaitWhenTheTestLetsIt", {"--max-restarts", "1"});
      ASSERT_TRUE(agents_.back()->wait_for(has_joined));
    }
    ASSERT_TRUE(agents_[0]->wait_for("of 4 starts anew"));
  }
  void touch(const char* name) const { std::ofstream(folder_.file(name)).flush(); }
};

// More hosts than places are no newcomers, so survivors have the time to come to wait that they
// have without a spare host. The spare host gets the place of a lost one. A lost host is no
// restart.
TEST_P(RunRecoverySpareHost, SurvivorsKeepTheirProcesses) {
  const bool is_failure = GetParam() == "failure";
  const bool is_killed = GetParam() == "killed";
  if (is_failure) touch("kill");
  if (is_killed) ::kill(agents_[1]->supervisor(), SIGKILL);
  if (GetParam() == "ctrl-c") agents_[1]->send(SIGINT);
  ASSERT_TRUE(agents_[0]->wait_for("round 1 ends: "));
  touch("wait");
  std::string output;
  for (size_t host = 0; host < agents_.size(); ++host) {
    const CommandResult result = agents_[host]->wait();
    const bool is_lost = host == 1 && !is_failure;
    EXPECT_EQ(result.exit_code, !is_lost ? 0 : 128 + (is_killed ? SIGKILL : SIGINT))
        << result.error << result.output;
    EXPECT_TRUE(agents_[host]->leaves_nothing());
    output += result.output;
  }
  const std::string attempt = is_failure ? "attempt 1" : "attempt 0";
  for (const int rank : {0, 1, 2, 3}) {
    const std::string prefix = cadre::format("[{}] rank {} of 4 starts ", rank, rank);
    const int before = pid_of(output, prefix + "anew, attempt 0");
    const int after = pid_of(output, prefix + "from rank 0 at step 0, " + attempt);
    const bool is_survivor = is_failure ? rank != 1 : rank < 2;
    EXPECT_EQ(before == after, is_survivor) << rank << "\n" << output;
  }
}

INSTANTIATE_TEST_SUITE_P(Ends, RunRecoverySpareHost,
                         ::testing::Values("killed", "ctrl-c", "failure"));

TEST(RunRecoveryWorker, TrainsUntilItIsAlone) {
  if (!is_recovery_worker()) return;
  RecoveringRank rank_program;
  while (true) {
    try {
      const auto group = rank_program.connect();
      rank_program.synchronize(*group);
      while (group->world_size() == 4) {
        group->barrier();
        rank_program.nap();
      }
      group->close(rank_program.system().deadline_in(kPatience));
      return;
    } catch (const Error& error) {
      if (!rank_program.recovery().can_recover(error)) throw;
    }
    rank_program.wait();
  }
}

}  // namespace
}  // namespace cadre::cli
