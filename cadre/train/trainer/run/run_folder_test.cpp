// Tests which snapshot a run continues from, and where the folder's other snapshots go.
#include "cadre/train/trainer/run/run_folder.h"

#include <filesystem>
#include <string>

#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/snapshots/run_origin.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class RunFolderTest : public TrainerTest {
 protected:
  Config config_of_steps(const std::string& name, int64_t steps) const {
    Config config = this->config(name);
    config.run.steps = steps;
    config.run.snapshot_every = 2;
    config.schedule.kind = "constant";
    return config;
  }

  // Runs until rank 0 reports the step, then ends as if the run were killed at that moment.
  Run run_until(const Config& config, int64_t step) {
    on_print_ = [step](std::string_view text) {
      if (text.starts_with("step " + std::to_string(step) + "/"))
        throw std::runtime_error("killed");
    };
    Run killed = run(config);
    on_print_ = [](std::string_view) {};
    EXPECT_THAT(killed.failures, HasSubstr("killed"));
    return killed;
  }

  void make_snapshot(int64_t step) const { fs::create_directories(snapshot("r", step)); }
  std::optional<std::string> find_auto() const {
    RunConfig run;
    run.resume = "auto";
    return find_snapshot(run, SnapshotFolder(folder_ + "/r"));
  }
};

// Another run could write a later snapshot after this run has chosen one, if the folder were not
// locked before.
TEST_F(RunFolderTest, ItIsLockedBeforeTheSnapshotIsChosen) {
  Config config = config_of_steps("a", 2);
  config.run.resume = folder_ + "/nothing";
  EXPECT_THAT(run(config, 2).failures, HasSubstr("no snapshot there"));
  const RunFolder other(folder_ + "/a");
  EXPECT_THAT(run(config, 2).failures,
              AllOf(HasSubstr("rank 0: kInvalidArgument: another run writes to "),
                    HasSubstr("rank 1: kInvalidArgument: another run writes to ")));
}

TEST_F(RunFolderTest, ARefusedRunLeavesNothing) {
  Config config = config_of_steps("a", 2);
  config.run.folder = folder_ + "/runs/of/mine";
  config.data.path = folder_ + "/none";
  EXPECT_THAT(run(config, 2).failures, HasSubstr("data.path: there is no file"));
  EXPECT_FALSE(fs::exists(folder_ + "/runs"));
}

TEST_F(RunFolderTest, ARunFromAnotherRunsSnapshotRemembersIt) {
  ASSERT_EQ(run(config_of_steps("a", 2)).failures, "");
  Config config = config_of_steps("b", 6);
  config.run.snapshot_every = 4;
  config.run.resume = folder_ + "/a";
  run_until(config, 3);
  config.run.resume = "auto";
  const std::string origin = "resuming from " + folder_ + "/a/step-000002\n";
  EXPECT_THAT(run_until(config, 3).screen, AllOf(HasSubstr(origin), Not(HasSubstr("moved to"))));
  Config third = config_of_steps("c", 4);
  third.run.resume = folder_ + "/b";
  EXPECT_THAT(run(third).screen, HasSubstr(origin));
  run_until(config, 6);  // the run leaves a snapshot of step 4
  const Run last = run(config, 2);
  ASSERT_EQ(last.failures, "");
  EXPECT_THAT(last.screen, HasSubstr("resuming from " + folder_ + "/b/step-000004\n"));
  EXPECT_EQ(losses("b").size(), 4u);
  EXPECT_THAT(SnapshotFolder(folder_ + "/b").steps(), ElementsAre(4, 6));
  EXPECT_FALSE(fs::exists(folder_ + "/b.1"));
}

TEST_F(RunFolderTest, AnOriginThatIsGoneIsRefused) {
  ASSERT_EQ(run(config_of_steps("a", 2)).failures, "");
  Config config = config_of_steps("b", 4);
  config.run.resume = folder_ + "/a";
  run_until(config, 3);
  fs::rename(folder_ + "/a", folder_ + "/elsewhere");
  config.run.resume = "auto";
  EXPECT_THAT(run(config, 2).failures,
              AllOf(HasSubstr("rank 1: "), HasSubstr("has continued from " + folder_ +
                                                     "/a/step-000002, which is no longer there")));
}

TEST_F(RunFolderTest, ARunFromASnapshotBelowItsFolderGoesOnInIt) {
  Config config = config_of_steps("a", 6);
  ASSERT_EQ(run(config).failures, "");
  const std::vector<double> expected = losses("a");
  Config other = config;
  other.optimizer.learning_rate = 1e-3;
  other.run.resume = folder_ + "/a/step-000002";
  ASSERT_EQ(run(other).failures, "");  // steps 4 and 6 of the first run are now in abandoned.1
  config.run.resume = folder_ + "/a/abandoned.1/step-000004";
  const std::string resuming = "resuming from " + folder_ + "/a/abandoned.1/step-000004\n";
  const Run killed = run_until(config, 5);
  EXPECT_THAT(killed.screen, AllOf(HasSubstr(resuming), HasSubstr("later steps were moved to " +
                                                                  folder_ + "/a/abandoned.2\n")));
  EXPECT_FALSE(fs::exists(folder_ + "/a.1"));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ElementsAre(2));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a/abandoned.2").steps(), ElementsAre(4, 6));
  config.run.resume = "auto";
  const Run resumed = run(config);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, AllOf(HasSubstr(resuming), Not(HasSubstr("moved to"))));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ElementsAre(2, 6));
  expect_same_bits("a", "a/abandoned.1", 6);
  EXPECT_EQ(losses("a"), expected);
  config.run.steps = 8;
  EXPECT_THAT(run(config).screen, HasSubstr("resuming from " + folder_ + "/a/step-000006\n"));
  // A run that has gone back to one of its own snapshots has no origin.
  config.run.resume = folder_ + "/a/step-000002";
  run_until(config, 3);
  config.run.resume = "auto";
  EXPECT_THAT(run(config).screen, HasSubstr("resuming from " + folder_ + "/a/step-000002\n"));
}

TEST_F(RunFolderTest, ASnapshotThatWasMovedBehindALinkIsItsOwn) {
  Config config = config_of_steps("a", 4);
  ASSERT_EQ(run(config).failures, "");
  fs::create_directories(folder_ + "/disk");
  fs::rename(snapshot("a", 4), folder_ + "/disk/step-000004");
  fs::create_directory_symlink(folder_ + "/disk/step-000004", snapshot("a", 4));
  config.run.steps = 6;
  for (const std::string& resume : {std::string("auto"), folder_ + "/disk/step-000004"}) {
    config.run.resume = resume;
    EXPECT_THAT(run_until(config, 5).screen, Not(HasSubstr("moved to"))) << resume;
    EXPECT_FALSE(fs::exists(folder_ + "/a.1"));
  }
  config.run.resume = "auto";
  const Run resumed = run(config);
  EXPECT_THAT(resumed.screen, HasSubstr("resuming from " + snapshot("a", 4) + "\n"));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ElementsAre(2, 4, 6));
}

// Creates the files that a crash leaves while the snapshots of another branch are being moved away.
TEST_F(RunFolderTest, AnOriginCountsUntilThereIsASnapshotOfItsBranch) {
  fs::create_directories(folder_ + "/r/abandoned.1/step-000004");
  const std::string below = folder_ + "/r/abandoned.1/step-000004";
  for (const int64_t step : {2, 4, 6}) make_snapshot(step);
  const RunOrigin origin = {.step = 4, .abandoned = {4, 6}, .snapshot = "abandoned.1/step-000004"};
  origin.write(folder_ + "/r");
  EXPECT_EQ(RunOrigin::read(folder_ + "/r"), origin);
  EXPECT_EQ(find_auto(), below);
  fs::remove(snapshot("r", 4));
  EXPECT_EQ(find_auto(), below);
  fs::remove(snapshot("r", 6));
  RunOrigin{.step = 4, .abandoned = {}, .snapshot = origin.snapshot}.write(folder_ + "/r");
  EXPECT_EQ(find_auto(), below);
  make_snapshot(6);
  EXPECT_EQ(find_auto(), snapshot("r", 6));
  fs::remove_all(snapshot("r", 6));
  write_content(folder_ + "/r/origin", "four\n/somewhere\n");
  EXPECT_THAT(testing::failure_of([&] { (void)find_auto(); }),
              HasSubstr("origin is damaged: expected a line with the step"));
}

TEST_F(RunFolderTest, ARestartedJobContinuesFromItsOwnSnapshot) {
  ASSERT_EQ(run(config_of_steps("whole", 6)).failures, "");
  const Config config = config_of_steps("r", 6);
  ASSERT_EQ(config.run.resume, "none");
  job_ = "job-1";
  run_until(config, 5);
  attempt_ = 1;
  const Run second = run(config);
  ASSERT_EQ(second.failures, "");
  EXPECT_THAT(second.screen, HasSubstr("resuming from " + snapshot("r", 4) + "\n"));
  expect_same_bits("whole", "r", 6);
}

// The first attempt of the second job failed before it wrote to the folder, so the folder still
// belongs to the first job.
TEST_F(RunFolderTest, ARestartedJobDoesNotContinueARunOfAnotherJob) {
  const Config config = config_of_steps("r", 2);
  job_ = "job-1";
  ASSERT_EQ(run(config).failures, "");
  job_ = "job-2";
  attempt_ = 1;
  const Run other = run(config);
  ASSERT_EQ(other.failures, "");
  EXPECT_THAT(other.screen, HasSubstr("moved to " + folder_ + "/r.1\n"));
  EXPECT_THAT(other.screen, Not(HasSubstr("resuming")));
}

TEST_F(RunFolderTest, TheFirstStartOfAJobForgetsAnEarlierOneOfItsName) {
  const std::string path = folder_ + "/r";
  RunFolder folder(path);
  EXPECT_FALSE(is_run_of_job(path, "job-1"));
  folder.forget_job();
  folder.record_job("job-1");
  EXPECT_TRUE(is_run_of_job(path, "job-1"));
  EXPECT_FALSE(is_run_of_job(path, "job-10"));
  EXPECT_FALSE(is_run_of_job(path, ""));
  folder.forget_job();
  EXPECT_FALSE(is_run_of_job(path, "job-1"));
}

}  // namespace
}  // namespace cadre::train
