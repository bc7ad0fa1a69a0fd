// Tests jobs that a scheduler ends: all ranks save one step and leave, and `cadre run` ends with
// the code that asks for another run.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/preemption/preemption.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kFolder = "CADRE_TEST_FOLDER";

// A worker of the tests below. It counts steps, and writes the last one to a file when it leaves.
class StepCounter {
 public:
  StepCounter() : world_(connect_from_environment(*system_, {}, system_->deadline_in(kPatience))) {}

  int rank() const { return world_->rank(); }
  Communicator& world() { return *world_; }

  // Runs steps until the ranks must leave, and returns the last one.
  int64_t run(Preemption& preemption) {
    while (true) {
      const int64_t mine = ++step_;
      int64_t least = 0;
      world_->all_reduce(std::as_bytes(std::span(&mine, 1)),
                         std::as_writable_bytes(std::span(&least, 1)), DType::kInt64,
                         ReduceOp::kMin);
      EXPECT_EQ(least, mine);
      nap();
      if (preemption.must_leave(*world_)) return step_;
    }
  }

  std::string file(int rank) const {
    return cadre::format("{}/saved{}", std::getenv(kFolder), rank);
  }
  void save() const { std::ofstream(file(rank())) << step_; }
  void nap() { system_->poll({}, system_->deadline_in(std::chrono::milliseconds(1))); }
  void close() { world_->close(system_->deadline_in(kPatience)); }

 private:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::unique_ptr<Communicator> world_;
  int64_t step_ = 0;
};

void print(const std::string& line) {
  std::printf("%s %d\n", line.c_str(), static_cast<int>(::getpid()));
  std::fflush(stdout);
}

bool is_worker() {
  return read_job_environment().value_or_throw().is_launched && std::getenv(kFolder) != nullptr;
}

// The tests named RunPreemptionWorker are programs that the tests below start as workers. They do
// nothing when they are run directly.
TEST(RunPreemptionWorker, SavesAndLeaves) {
  if (!is_worker()) return;
  Preemption preemption;
  print("up");
  StepCounter steps;
  const int64_t step = steps.run(preemption);
  steps.save();
  steps.close();
  std::exit(preemption.leave(step));
}

// Rank 1 fails in the first attempt.
TEST(RunPreemptionWorker, FailsOnceThenSavesAndLeaves) {
  if (!is_worker()) return;
  Preemption preemption;
  StepCounter steps;
  const bool is_first = std::string(std::getenv("TORCHELASTIC_RESTART_COUNT")) == "0";
  if (is_first && steps.rank() == 1) std::_Exit(3);
  if (!is_first) print("again");
  const int64_t step = steps.run(preemption);
  steps.save();
  steps.close();
  std::exit(preemption.leave(step));
}

TEST(RunPreemptionWorker, SavesForever) {
  if (!is_worker()) return;
  Preemption preemption;
  print("up");
  StepCounter steps;
  steps.run(preemption);
  print("saving");
  while (true) steps.nap();
}

// Rank 1 fails after rank 0 has saved. Both end without closing the group.
TEST(RunPreemptionWorker, FailsToSave) {
  if (!is_worker()) return;
  Preemption preemption;
  print("up");
  StepCounter steps;
  const int64_t step = steps.run(preemption);
  if (steps.rank() == 0) {
    steps.save();
    std::_Exit(preemption.leave(step));
  }
  while (!std::filesystem::exists(steps.file(0))) steps.nap();
  std::_Exit(3);
}

// Rank 0 leaves by itself, and rank 1 does not.
TEST(RunPreemptionWorker, LeavesAlone) {
  if (!is_worker()) return;
  Preemption preemption;
  StepCounter steps;
  if (steps.rank() == 0) std::_Exit(preemption.leave(5));
  while (true) steps.nap();
}

TEST(RunPreemptionWorker, LeavesAtAStepOfItsOwn) {
  if (!is_worker()) return;
  Preemption preemption;
  print("up");
  StepCounter steps;
  steps.run(preemption);
  steps.close();
  std::exit(preemption.leave(10 + steps.rank()));
}

// The last rank never asks whether it must leave.
TEST(RunPreemptionWorker, DoesNotAsk) {
  if (!is_worker()) return;
  Preemption preemption;
  StepCounter steps;
  print("up");
  while (true) {
    steps.nap();
    if (steps.rank() + 1 < steps.world().world_size()) preemption.must_leave(steps.world());
  }
}

class RunPreemption : public ::testing::Test {
 protected:
  std::vector<std::string> job(int num_workers, const std::string& worker,
                               const std::vector<std::string>& options = {}) const {
    std::vector<std::string> words{"run", "--nproc-per-node", cadre::format("{}", num_workers)};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), {os::own_executable().value_or_throw(), "--gtest_brief=1",
                               "--gtest_filter=RunPreemptionWorker." + worker});
    return words;
  }
  CadreCommand::Options environment() const {
    return {.environment = {{kFolder, folder_.path().string()}}};
  }

  // Waits until each worker has written `line`, and returns the pid of the first one.
  static int await_workers(CadreCommand& command, int num_workers, const std::string& line) {
    for (int rank = 0; rank < num_workers; ++rank) {
      const std::string mark = cadre::format("[{}] {} ", rank, line);
      EXPECT_TRUE(command.wait_for(mark)) << command.seen().error;
    }
    const std::string& output = command.seen().output;
    const std::string mark = cadre::format("[0] {} ", line);
    const size_t at = output.find(mark);
    return at == std::string::npos ? 0 : std::atoi(output.c_str() + at + mark.size());
  }

  std::string saved(int rank) const {
    std::ifstream file(folder_.file(cadre::format("saved{}", rank)));
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const testing::TemporaryFolder folder_;
};

// The signal arrives at a random instant from the construction of the Preemption on, also while the
// ranks connect: at the launcher, or (kind 3) at rank 0 only. In every third job that signals the
// launcher, SIGTERM follows at a random instant, as it does in Slurm.
TEST_F(RunPreemption, AtAnyInstantAllRanksSaveOneStepAndTheJobAsksForAnotherRun) {
  constexpr int kNumJobs = 100;
  constexpr std::array kKinds{SIGTERM, SIGUSR1, SIGUSR2, 0};
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < kNumJobs; ++i) {
    const int num_workers = 1 + i % 4;
    const int signal = kKinds[static_cast<size_t>(i / 4) % kKinds.size()];
    const auto delay = std::chrono::microseconds(random() % 60'000);
    SCOPED_TRACE(cadre::format("job {}: {} workers, signal {}, after {} us", i, num_workers, signal,
                               delay.count()));
    CadreCommand command(job(num_workers, "SavesAndLeaves"), environment());
    const int first_worker = await_workers(command, num_workers, "up");
    ASSERT_GT(first_worker, 0);
    system_->poll({}, system_->deadline_in(delay));
    if (signal != 0) {
      command.send(signal);
    } else {
      ::kill(first_worker, SIGUSR1);
    }
    if (signal != 0 && i % 3 == 0) {
      system_->poll({}, system_->deadline_in(std::chrono::microseconds(random() % 30'000)));
      command.send(SIGTERM);
    }
    const auto result = command.wait();
    ASSERT_EQ(result.exit_code, kRequeueExitCode) << result.error << result.output;
    const std::string step = saved(0);
    ASSERT_GE(std::atoi(step.c_str()), 2);
    for (int rank = 1; rank < num_workers; ++rank) ASSERT_EQ(saved(rank), step);
    const std::string by = signal == 0 ? "" : " by " + os::signal_name(signal);
    const std::string ranks =
        num_workers == 1 ? "1 rank" : cadre::format("all {} ranks", num_workers);
    ASSERT_THAT(result.error, EndsWith(cadre::format("cadre: preempted{}, saved at step {} by {}; "
                                                     "exit code 75 asks for another run\n",
                                                     by, step, ranks)));
    ASSERT_TRUE(command.leaves_nothing());
    for (int rank = 0; rank < num_workers; ++rank) {
      std::filesystem::remove(folder_.file(cadre::format("saved{}", rank)));
    }
  }
}

TEST_F(RunPreemption, IsNoFailureToRestart) {
  CadreCommand command(job(2, "SavesAndLeaves", {"--max-restarts", "2"}), environment());
  ::kill(await_workers(command, 2, "up"), SIGUSR2);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, kRequeueExitCode) << result.error;
  EXPECT_THAT(result.error, Not(HasSubstr("restart")));
  EXPECT_THAT(result.error, Not(HasSubstr("failed")));
}

// The launcher sends SIGTERM to rank 0 when rank 1 has failed. That is no request to leave for the
// next attempt.
TEST_F(RunPreemption, AnAttemptAfterAFailureLeavesWithTheRequeueCode) {
  CadreCommand command(job(2, "FailsOnceThenSavesAndLeaves", {"--max-restarts", "1"}),
                       environment());
  await_workers(command, 2, "again");
  command.send(SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, kRequeueExitCode) << result.error;
  EXPECT_THAT(result.error, HasSubstr(cadre::format("cadre: preempted by SIGUSR1, saved at step {} "
                                                    "by all 2 ranks; ",
                                                    saved(0))));
  EXPECT_THAT(result.error, HasSubstr("cadre: preempted after 1 restart; earlier failures: "));
}

TEST_F(RunPreemption, ASecondSignalKillsAtOnce) {
  CadreCommand command(job(2, "SavesForever", {"--shutdown-timeout", "1000"}), environment());
  await_workers(command, 2, "up");
  command.send(SIGTERM);
  await_workers(command, 2, "saving");
  // The pause is needed because two signals within 100 ms count as one.
  system_->poll({}, system_->deadline_in(std::chrono::milliseconds(150)));
  command.send(SIGINT);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.error;
  EXPECT_THAT(result.error, HasSubstr("cadre: Ctrl-C again: killing what is left\n"));
  EXPECT_THAT(
      result.error,
      EndsWith("cadre: preempted by SIGTERM, but no step was saved by all ranks: ranks 0-1 "
               "called Preemption::must_leave(), and saved no snapshot, ended with signal 9 "
               "(SIGKILL)\n"));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunPreemption, ARankThatDoesNotAskIsNamed) {
  CadreCommand command(job(3, "DoesNotAsk", {"--shutdown-timeout", "3"}), environment());
  await_workers(command, 3, "up");
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.error, HasSubstr("cadre: killed, because they did not end within 3 s of "
                                      "SIGTERM: ranks 0-2\n"));
  EXPECT_THAT(result.error, HasSubstr("; rank 2 did not call "
                                      "Preemption::must_leave(), ended with signal 9 (SIGKILL)\n"));
  EXPECT_THAT(result.error, HasSubstr(": ranks 0-1 called Preemption::must_leave(), and saved no "
                                      "snapshot"));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunPreemption, ARankThatFailsToSaveIsTheFailure) {
  CadreCommand command(job(2, "FailsToSave"), environment());
  ::kill(await_workers(command, 2, "up"), SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 3) << result.error;
  EXPECT_THAT(result.error, HasSubstr("cadre: rank 1 of 2 failed with exit code 3 on "));
  EXPECT_THAT(result.error, ContainsRegex("  others: rank 0: saved step [0-9]+ and left\n"));
  EXPECT_THAT(result.error, Not(HasSubstr("preempted")));
}

TEST_F(RunPreemption, ARankThatStaysWhenAnotherHasLeftIsKilledAndNamed) {
  CadreCommand command(job(2, "LeavesAlone", {"--shutdown-timeout", "1"}), environment());
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("cadre: killed, because it did not end within 1 s of the end "
                                      "of rank 0: rank 1\n"));
  EXPECT_THAT(result.error,
              EndsWith("cadre: preempted, but no step was saved by all ranks: rank 1 "
                       "did not call Preemption::must_leave(), ended "
                       "with signal 9 (SIGKILL); rank 0 saved step 5, ended with exit code 75\n"));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunPreemption, DifferentStepsDoNotAskForAnotherRun) {
  CadreCommand command(job(2, "LeavesAtAStepOfItsOwn"), environment());
  await_workers(command, 2, "up");
  command.send(SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 1) << result.error;
  EXPECT_THAT(result.error, HasSubstr("no step was saved by all ranks: rank 0 saved step 10, ended "
                                      "with exit code 75; rank 1 saved step 11, ended with exit "
                                      "code 75\n"));
}

TEST_F(RunPreemption, ALauncherThatIsAWorkerTellsItsCaller) {
  std::vector<std::string> inner = job(2, "SavesAndLeaves");
  inner.insert(inner.begin(), cadre::testing::build_path("bin/cadre"));
  std::vector<std::string> words{"run"};
  words.insert(words.end(), inner.begin(), inner.end());
  CadreCommand command(words, environment());
  ASSERT_TRUE(command.wait_for("[0] [0] up ") && command.wait_for("[0] [1] up "));
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, kRequeueExitCode) << result.error;
  EXPECT_THAT(result.error, EndsWith(cadre::format("cadre: preempted by SIGTERM, saved at step {} "
                                                   "by 1 rank; exit code 75 asks for another run\n",
                                                   saved(0))));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST_F(RunPreemption, TheExitCodeAloneIsAFailure) {
  const auto result = run_cadre(shell_job(1, "exit 75"));
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.error, HasSubstr("cadre: rank 0 of 1 failed with exit code 75 on "));
}

}  // namespace
}  // namespace cadre::cli
