// Tests signals that the launcher forwards to all processes of `cadre train`: all ranks must end
// after the same step and write one snapshot, and the run that resumes from it must have the same
// bits as an undisturbed run. Also tests SIGKILL of one process of a job that divides the model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/preemption/preemption.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/torch/small_training.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using cli::CadreCommand;
using cli::CommandResult;
using testing::content_of;
using ::testing::HasSubstr;

constexpr int kNumSteps = 400;

// Returns the pid of the process that has this rank; 0 if there is none.
int pid_of_rank(const CadreCommand& job, int rank) {
  const std::string variable = std::string(1, '\0') + format("RANK={}", rank) + '\0';
  for (const int pid : job.marked_processes()) {
    const fs::path process = format("/proc/{}", pid);
    const bool is_trainer = content_of(process / "comm") == "cadre-train\n";
    if (is_trainer && content_of(process / "environ").find(variable) != std::string::npos)
      return pid;
  }
  return 0;
}

class TrainSignalTest : public ::testing::Test {
 protected:
  std::vector<std::string> train(const std::string& run, const std::string& resume = "none") const {
    return {
        "train", training_.config(), "run.name=" + run, "run.resume=" + resume, "--nproc-per-node",
        "2"};
  }

  std::vector<std::string> snapshots_of(const std::string& run) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(training_.folder_of(run))) {
      if (entry.is_directory()) names.push_back(entry.path().filename());
    }
    return names;
  }

  const testing::SmallTraining training_{kNumSteps};
};

TEST_F(TrainSignalTest, CtrlCAndAHangupEndWithASnapshotToo) {
  // The command inherits the default action of SIGHUP, so that the test also works under nohup.
  const auto handler = ::signal(SIGHUP, SIG_DFL);
  for (const int signal : {SIGINT, SIGHUP}) {
    const std::string run = format("run{}", signal);
    CadreCommand job(train(run));
    ASSERT_TRUE(job.wait_for(format("step   5/{} ", kNumSteps)));
    job.send(signal);
    const CommandResult stopped = job.wait();
    EXPECT_EQ(stopped.exit_code, 128 + signal) << stopped.output << stopped.error;
    EXPECT_THAT(stopped.output,
                HasSubstr(format("stopped after step {} on", training_.steps_of(run).size())));
    EXPECT_EQ(snapshots_of(run).size(), 1U);
    EXPECT_TRUE(job.leaves_nothing());
  }
  ::signal(SIGHUP, handler);
}

TEST_F(TrainSignalTest, AResumedJobHasTheBitsOfAnUndisturbedOne) {
  ASSERT_EQ(cli::run_cadre(train("whole")).exit_code, 0);

  CadreCommand job(train("parts"));
  ASSERT_TRUE(job.wait_for(format("step  20/{} ", kNumSteps)));
  job.send(SIGTERM);
  const CommandResult stopped = job.wait();
  EXPECT_EQ(stopped.exit_code, kRequeueExitCode) << stopped.output << stopped.error;
  EXPECT_TRUE(job.leaves_nothing());
  const size_t num_done = training_.steps_of("parts").size();
  ASSERT_GE(num_done, 20U);
  ASSERT_LT(num_done, static_cast<size_t>(kNumSteps)) << "the job had ended before its signal";
  EXPECT_THAT(stopped.output, HasSubstr(format("stopped after step {} on request", num_done)));
  EXPECT_THAT(stopped.error,
              HasSubstr(format("cadre: preempted by SIGTERM, saved at step {} by all "
                               "2 ranks; exit code 75 asks for another run\n",
                               num_done)));
  const std::string snapshot = format("step-{:06d}", num_done);
  EXPECT_THAT(snapshots_of("parts"), ::testing::ElementsAre(snapshot));
  EXPECT_EQ(content_of(training_.folder_of("parts") / "latest"), snapshot + "\n");

  const CommandResult resumed = cli::run_cadre(train("parts", "auto"));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_THAT(resumed.output, HasSubstr(format("resuming from {}/{}\n",
                                               training_.folder_of("parts").string(), snapshot)));
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string expected = training_.snapshot_file("whole", file);
    EXPECT_FALSE(expected.empty());
    EXPECT_TRUE(training_.snapshot_file("parts", file) == expected) << file;
  }
  EXPECT_EQ(training_.steps_of("parts").size(), static_cast<size_t>(kNumSteps));
  EXPECT_EQ(training_.steps_of("parts"), training_.steps_of("whole"));
}

// A restart is possible, but must not follow. The signal reaches one rank only if it is not sent to
// the launcher.
TEST_F(TrainSignalTest, ASchedulersSignalToTheJobOrToOneRankEndsItWithASnapshot) {
  struct Case {
    bool is_for_one_rank;
    std::string division;
  };
  const std::vector<Case> cases{{false, "parallel.pipeline=1"},
                                {true, "parallel.pipeline=1"},
                                {true, "parallel.pipeline=2"},
                                {true, "parallel.tensor=2"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [is_for_one_rank, division] = cases[i];
    SCOPED_TRACE(format("one rank {}, {}", is_for_one_rank, division));
    const std::string run = format("run{}", i);
    std::vector<std::string> words = train(run);
    words.insert(words.end(), {division, "model.layers=2", "--max-restarts", "1"});
    CadreCommand job(words);
    ASSERT_TRUE(job.wait_for(format("step   5/{} ", kNumSteps)));
    const int target = is_for_one_rank ? pid_of_rank(job, 1) : job.pid();
    ASSERT_GT(target, 0);
    ::kill(target, SIGUSR1);
    const CommandResult stopped = job.wait();
    EXPECT_EQ(stopped.exit_code, kRequeueExitCode) << stopped.output << stopped.error;
    EXPECT_THAT(stopped.error, HasSubstr(format(", saved at step {} by all 2 ranks",
                                                training_.steps_of(run).size())));
    EXPECT_EQ(snapshots_of(run).size(), 1U);
    EXPECT_TRUE(job.leaves_nothing());
  }
}

// Each rank writes its shard in a background thread, so at nearly every instant a snapshot is being
// written.
TEST_F(TrainSignalTest, AJobThatIsKilledWhileItSavesGoesOnFromAWholeSnapshot) {
  const auto words = [this](const std::string& run, const std::string& resume) {
    std::vector<std::string> all = train(run, resume);
    all.insert(all.end(), {"run.steps=60", "run.snapshot_every=1", "parallel.strategy=fsdp"});
    return all;
  };
  ASSERT_EQ(cli::run_cadre(words("whole", "none")).exit_code, 0);
  for (const int step : {15, 30, 45}) {
    CadreCommand job(words("parts", step == 15 ? "none" : "auto"));
    ASSERT_TRUE(job.wait_for(format("step {}/60 ", step)));
    job.send(SIGKILL);
    job.wait();
    EXPECT_TRUE(job.leaves_nothing());
  }
  const CommandResult resumed = cli::run_cadre(words("parts", "auto"));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_THAT(resumed.output,
              HasSubstr(format("resuming from {}/step-", training_.folder_of("parts").string())));
  EXPECT_EQ(training_.steps_of("parts").size(), 60U);
  EXPECT_EQ(training_.steps_of("parts"), training_.steps_of("whole"));
}

TEST_F(TrainSignalTest, AKilledProcessThatHasAPartOfTheModelIsNamedAndEndsTheJob) {
  const std::vector<std::vector<std::string>> divisions = {
      {"parallel.tensor=2"}, {"parallel.pipeline=2"}, {"parallel.tensor=2", "parallel.pipeline=2"}};
  for (const std::vector<std::string>& keys : divisions) {
    std::vector<std::string> words = train("divided");
    words.back() = std::to_string(2 * keys.size());
    words.insert(words.end(), keys.begin(), keys.end());
    words.emplace_back("model.layers=2");
    CadreCommand job(words);
    ASSERT_TRUE(job.wait_for(format("step   5/{} ", kNumSteps))) << job.seen().error;
    const int victim = pid_of_rank(job, 1);
    ASSERT_GT(victim, 0);
    ::kill(victim, SIGKILL);
    const CommandResult ended = job.wait();
    EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.error;
    EXPECT_THAT(ended.error,
                HasSubstr(format("cadre: rank 1 of {} failed with signal 9 (SIGKILL) on ",
                                 2 * keys.size())));
    EXPECT_THAT(ended.error, HasSubstr(format(", pid {}, after ", victim)));
    EXPECT_TRUE(job.leaves_nothing());
  }
}

TEST_F(TrainSignalTest, ARestartedJobHasTheBitsOfAnUndisturbedOne) {
  const auto words = [this](const std::string& run) {
    std::vector<std::string> all = train(run);
    all.insert(all.end(), {"run.snapshot_every=10", "--max-restarts", "2"});
    return all;
  };
  ASSERT_EQ(cli::run_cadre(words("whole")).exit_code, 0);
  CadreCommand job(words("parts"));
  ASSERT_TRUE(job.wait_for(format("step  25/{} ", kNumSteps))) << job.seen().error;
  const int victim = pid_of_rank(job, 1);
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  const CommandResult ended = job.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_THAT(ended.output,
              HasSubstr(format("resuming from {}/step-", training_.folder_of("parts").string())));
  EXPECT_THAT(ended.error, HasSubstr("cadre: succeeded after 1 restart; earlier failures: rank 1: "
                                     "signal 9 (SIGKILL) after "));
  EXPECT_EQ(training_.steps_of("parts"), training_.steps_of("whole"));
  EXPECT_TRUE(job.leaves_nothing());
}

// The job writes no snapshots by itself, so without the state of the survivor it would begin again.
TEST_F(TrainSignalTest, ASurvivorInPlaceKeepsItsProcessAndNoStepIsLost) {
  ASSERT_EQ(cli::run_cadre(train("whole")).exit_code, 0);
  for (const int victim : {1, 0}) {
    const std::string run = format("parts{}", victim);
    std::vector<std::string> words = train(run);
    words.insert(words.end(), {"run.recovery=in_place", "--max-restarts", "1"});
    CadreCommand job(words);
    ASSERT_TRUE(job.wait_for(format("step  25/{} ", kNumSteps))) << job.seen().error;
    const int victim_pid = pid_of_rank(job, victim);
    const int survivor_pid = pid_of_rank(job, 1 - victim);
    ASSERT_GT(victim_pid, 0);
    ASSERT_GT(survivor_pid, 0);
    ::kill(victim_pid, SIGKILL);
    ASSERT_TRUE(job.wait_for("resuming from")) << job.seen().error;
    EXPECT_EQ(pid_of_rank(job, 1 - victim), survivor_pid);
    const CommandResult ended = job.wait();
    EXPECT_EQ(ended.exit_code, 0) << ended.error;
    EXPECT_THAT(ended.error,
                HasSubstr(format("starting 1 worker again; rank {} stays running\n", 1 - victim)));
    EXPECT_EQ(snapshots_of(run).size(), 2U);  // that of the survivor, and that of the end
    const int resumed = std::stoi(std::ranges::min(snapshots_of(run)).substr(std::strlen("step-")));
    EXPECT_EQ(training_.steps_of(run), victim == 0
                                           ? training_.steps_without_rank_0("whole", run, resumed)
                                           : training_.steps_of("whole"));
    const std::string model = training_.snapshot_file(run, "model.safetensors");
    EXPECT_TRUE(!model.empty() && model == training_.snapshot_file("whole", "model.safetensors"));
    EXPECT_TRUE(job.leaves_nothing());
  }
}

// The dead rank's shard exists nowhere else, so the run continues from the last snapshot.
TEST_F(TrainSignalTest, ASurvivorInPlaceOfAShardedRunContinuesFromTheLastSnapshot) {
  const auto words = [this](const std::string& run) {
    std::vector<std::string> all = train(run);
    all.insert(all.end(), {"run.recovery=in_place", "run.snapshot_every=10", "--max-restarts", "1",
                           "parallel.strategy=fsdp"});
    return all;
  };
  ASSERT_EQ(cli::run_cadre(words("whole")).exit_code, 0);
  CadreCommand job(words("parts"));
  ASSERT_TRUE(job.wait_for(format("step  25/{} ", kNumSteps))) << job.seen().error;
  const int survivor = pid_of_rank(job, 0);
  ::kill(pid_of_rank(job, 1), SIGKILL);
  ASSERT_TRUE(job.wait_for("resuming from")) << job.seen().error;
  EXPECT_EQ(pid_of_rank(job, 0), survivor);
  const CommandResult ended = job.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_EQ(training_.steps_of("parts"), training_.steps_of("whole"));
  EXPECT_TRUE(job.leaves_nothing());
}

}  // namespace
}  // namespace cadre
