// Tests the folder of a run: full disks, damaged snapshots, two runs with the same name, and
// changed settings of a resumed run.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/run/run_folder.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(TrainerTest, ASecondRunMovesTheFirstAside) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  const Run second = run(config);
  ASSERT_EQ(second.failures, "");
  EXPECT_THAT(second.screen, HasSubstr("moved to " + folder_ + "/a.1\n"));
  EXPECT_EQ(metrics("a.1").size(), 3u);
  EXPECT_TRUE(SnapshotFolder(folder_ + "/a.1").latest());
}

TEST_F(TrainerTest, AFailedSnapshotIsSaidAndTrainingGoesOn) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.steps = 6;
  config.run.snapshot_every = 2;
  config.run.resume = "auto";
  std::optional<testing::FileSizeLimit> disk;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step 4/")) disk.emplace(8192);
    if (text.starts_with("warning: snapshot")) disk.reset();
  };
  const Run second = run(config, 2);
  ASSERT_EQ(second.failures, "");
  EXPECT_EQ(second.result.steps, 6);
  EXPECT_THAT(second.screen, HasSubstr("warning: snapshot of step 4: write "));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ::testing::ElementsAre(2, 6));
}

TEST_F(TrainerTest, ARunWhoseLastSnapshotFailsEndsWithAnError) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.steps = 6;
  config.run.resume = "auto";
  std::optional<testing::FileSizeLimit> disk;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step ")) disk.emplace(8192);
    if (text.starts_with("a sample") || text.starts_with("warning: snapshot")) disk.reset();
  };
  const std::string end = "step 6, whose snapshot could not be written; the last one is of step 2";
  const Run whole = run(config, 2);
  EXPECT_THAT(whole.failures, AllOf(HasSubstr("rank 0: "), HasSubstr("rank 1: "), HasSubstr(end)));
  const Run stopped = run(config, 2, /*stop_after=*/1);
  EXPECT_THAT(stopped.failures, HasSubstr("the run ended at step 3, whose"));
  EXPECT_THAT(stopped.screen, Not(HasSubstr("on request")));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ::testing::ElementsAre(2));
}

TEST_F(TrainerTest, ARunWithoutAnySnapshotDoesNotAdviseToGoOn) {
  Config config = this->config("a");
  config.run.steps = 2;
  std::optional<testing::FileSizeLimit> disk;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step ")) disk.emplace(8192);
    if (text.starts_with("a sample") || text.starts_with("warning: snapshot")) disk.reset();
  };
  EXPECT_THAT(run(config).failures,
              AllOf(HasSubstr("the run ended at step 2, but no snapshot could be written, so "
                              "its result is lost: free disk space in "),
                    HasSubstr("and start it again"), Not(HasSubstr("go on"))));
}

TEST_F(TrainerTest, ABestLossThatWasNotKeptIsForgotten) {
  Config config = this->config("a");
  config.run.steps = 8;
  config.run.evaluate_every = 2;
  config.run.keep_best = true;
  std::optional<testing::FileSizeLimit> disk;
  bool has_failed = false;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("held-out") && !has_failed) disk.emplace(8192);
    if (!text.starts_with("warning: snapshot")) return;
    has_failed = true;
    disk.reset();
  };
  ASSERT_EQ(run(config, 2).failures, "");
  // Each loss is lower than the one before, so each evaluation saves a snapshot. The first save, of
  // step 2, fails; the later ones must succeed.
  const SnapshotFolder snapshots(folder_ + "/a");
  EXPECT_THAT(snapshots.steps(), ::testing::ElementsAre(4, 6, 8));
  EXPECT_EQ(snapshots.best(), snapshots.path_of(8));
}

TEST_F(TrainerTest, AFullDiskLosesLinesOfTheMetricsAndNotTheRest) {
  Config config = this->config("a");
  // The limit leaves room for the metrics line of one step and a part of the next line.
  std::optional<testing::FileSizeLimit> disk(300);
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step  6/")) disk.reset();
  };
  const Run run = this->run(config);
  ASSERT_EQ(run.failures, "");
  const std::string warning = "warning: write " + folder_ + "/a/metrics.jsonl: ";
  EXPECT_THAT(run.screen, HasSubstr(warning));
  EXPECT_EQ(run.screen.find(warning), run.screen.rfind(warning))
      << "the warning must be printed once";
  std::vector<int> steps;
  for (const nlohmann::json& line : metrics("a")) {
    if (line.contains("loss")) steps.push_back(line["step"]);
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 6, 7, 8, 9, 10, 11, 12));
}

TEST_F(TrainerTest, OneRunWritesToAFolderAtATime) {
  Config config = this->config("a");
  config.run.steps = 2;
  {
    const RunFolder other(folder_ + "/a");
    const std::string owner = format("another run writes to {}/a (pid {} on ", folder_, ::getpid());
    const std::string kind = "kInvalidArgument: ";
    EXPECT_THAT(run(config).failures, HasSubstr(owner));
    config.run.resume = "auto";
    EXPECT_THAT(run(config).failures, HasSubstr(owner));
    // Only rank 0 opens the folder; all ranks throw its error.
    EXPECT_THAT(run(config, 2).failures,
                AllOf(HasSubstr("rank 0: " + kind + owner), HasSubstr("rank 1: " + kind + owner)));
  }
  std::ofstream(folder_ + "/a/.lock") << "what a killed run left";
  ASSERT_EQ(run(config).failures, "");
  EXPECT_FALSE(fs::exists(folder_ + "/a/.lock"));
  EXPECT_FALSE(fs::exists(folder_ + "/a.1"));
}

TEST_F(TrainerTest, GoingOnFromAnotherRunLeavesItAndAnEarlierOneOfThisNameAlone) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.name = "b";
  config.run.steps = 3;
  ASSERT_EQ(run(config).failures, "");
  config.run.steps = 4;
  config.run.resume = folder_ + "/a/step-000002/";
  const Run resumed = run(config);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, HasSubstr("moved to " + folder_ + "/b.1\n"));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ::testing::ElementsAre(2));
  EXPECT_THAT(SnapshotFolder(folder_ + "/b.1").steps(), ::testing::ElementsAre(3));
  EXPECT_THAT(SnapshotFolder(folder_ + "/b").steps(), ::testing::ElementsAre(4));
  // A run that resumes from one of its own snapshots continues in its folder.
  config.run.resume = folder_ + "/b";
  config.run.steps = 5;
  ASSERT_EQ(run(config).failures, "");
  EXPECT_THAT(SnapshotFolder(folder_ + "/b").steps(), ::testing::ElementsAre(4, 5));
}

TEST_F(TrainerTest, ARunThatHasNoStepLeftSaysSo) {
  Config config = this->config("a");
  config.run.steps = 3;
  ASSERT_EQ(run(config).failures, "");
  config.run.resume = "auto";
  const std::string end = ": no steps are left; set a larger run.steps to continue\n";
  EXPECT_THAT(run(config).screen, HasSubstr("run.steps is 3, and the snapshot is of step 3" + end));
  config.run.steps = 2;
  EXPECT_THAT(run(config, 2).screen,
              HasSubstr("run.steps is 2, and the snapshot is of step 3" + end));
  config.run.steps = 4;
  EXPECT_THAT(run(config).screen, Not(HasSubstr("no steps are left")));
}

TEST_F(TrainerTest, SaysWhatHasChangedSinceTheSnapshot) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.resume = "auto";
  config.run.steps = 4;
  config.run.seed = 7;
  const Run resumed = run(config, 2);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen,
              HasSubstr("changed since the snapshot: run.steps 2 -> 4, run.seed 0 -> 7\n"));
  EXPECT_THAT(resumed.screen, HasSubstr("warning: run.seed has changed: the rest of this epoch"));
  // This run has another optimizer and schedule kind, so the changed keys have no effect and are
  // not reported.
  config.optimizer.momentum = 0.5;
  config.optimizer.rho = 0.5;
  config.schedule.gamma = 0.5;
  config.run.steps = 5;
  EXPECT_THAT(run(config, 2).screen, HasSubstr("changed since the snapshot: run.steps 4 -> 5\n"));
  const auto refusal = [&](auto change) {
    Config changed = config;
    change(changed);
    return run(changed, 2).failures;
  };
  EXPECT_THAT(refusal([](Config& changed) { changed.model.tied = false; }),
              HasSubstr("model.tied was true when the snapshot was written and is false now"));
  EXPECT_THAT(refusal([](Config& changed) { changed.model.heads = 1; }),
              HasSubstr("model.heads was 2 when the snapshot was written and is 1 now"));
  EXPECT_THAT(refusal([](Config& changed) { changed.model.experts = 4; }),
              HasSubstr("model.experts was 0 when the snapshot was written and is 4 now"));
  EXPECT_THAT(refusal([](Config& changed) { changed.data.held_out = 0.5; }),
              HasSubstr("data.held_out was 0.05 when the snapshot was written and is 0.5 now: "));
  EXPECT_THAT(refusal([](Config& changed) { changed.optimizer.kind = "adam"; }),
              HasSubstr("optimizer.kind was \"adamw\""));
  EXPECT_THAT(refusal([](Config& changed) { changed.model.kind = "mlp"; }),
              HasSubstr("model.kind was \"gpt\""));
}

TEST_F(TrainerTest, ADamagedSnapshotNamesAnother) {
  Config config = this->config("a");
  config.run.steps = 4;
  config.run.snapshot_every = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.resume = "auto";
  config.run.steps = 6;
  const std::string remedy =
      "; another snapshot is intact: run.resume=" + folder_ + "/a/step-000002";
  const std::string latest = folder_ + "/a/step-000004/";
  // Format 2 has no digests, so other checks of the files must find the damage.
  set_format(latest, 2);
  for (const std::string file : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    fs::rename(latest + file, folder_ + "/kept");
    EXPECT_THAT(run(config).failures, HasSubstr(remedy)) << file << " is missing";
    std::ofstream(latest + file) << "damaged";
    EXPECT_THAT(run(config).failures, AllOf(HasSubstr(file), HasSubstr(remedy)));
    fs::rename(folder_ + "/kept", latest + file);
  }
  nlohmann::json state = nlohmann::json::parse(std::ifstream(latest + "state.json"));
  state["generators"][0] = "00";
  std::ofstream(latest + "state.json") << state.dump();
  EXPECT_THAT(run(config).failures, HasSubstr("a generator's state has 1 bytes instead of "));
  fs::remove_all(folder_ + "/a/step-000002");
  EXPECT_THAT(run(config).failures, HasSubstr("; no other snapshot is intact: start at step 0"));
  // The runs that failed at their start have written no metrics.
  ASSERT_EQ(metrics("a").size(), 5u);
}

TEST_F(TrainerTest, NamesTheKeyOfWhatCannotBe) {
  Config config = this->config("a");
  config.data.path = folder_ + "/nothing";
  EXPECT_THAT(run(config).failures, HasSubstr("kInvalidArgument: data.path: there is no file or "
                                              "folder " +
                                              folder_ + "/nothing"));
  config = this->config("a");
  config.run.global_batch_size = 1000000;
  EXPECT_THAT(run(config).failures,
              ::testing::ContainsRegex(
                  "run.global_batch_size is 1000000, but the training data have only [0-9]+ "
                  "samples without those of data.held_out"));
  config = this->config("a");
  config.run.global_batch_size = 1;
  EXPECT_THAT(run(config, 2).failures,
              HasSubstr("run.global_batch_size is 1, the samples of all 2 processes"));
  config = this->config("a");
  config.model.context = 4000;
  EXPECT_THAT(run(config).failures, HasSubstr("data.path: the held-out text has "));
  config = this->config("a");
  config.run.epochs = 1;
  config.schedule.warmup_steps = 1000;
  EXPECT_THAT(run(config).failures, HasSubstr("more than the 111 steps of run.epochs=1"));
}

TEST_F(TrainerTest, ProcessesWithDifferentConfigurationsOfTheDataAreRefused) {
  const auto failures = [this](const std::function<void(RunConfig&)>& change) {
    const testing::RanksResult ranks = testing::run_groups(2, [&](const ProcessGroup& group) {
      Config config = this->config("a");
      if (group.rank() == 1) change(config.run);
      const auto system = os::make_native_system();
      const std::string failure = testing::failure_of([&] {
        const Trainer trainer(config, {.world = group,
                                       .system = *system,
                                       .time_in_communication = [] { return Duration(0); },
                                       .stop_is_requested = [] { return false; },
                                       .print = [](std::string_view) {}});
      });
      if (!failure.empty()) throw Error(ErrorCode::kInvalidArgument, failure);
    });
    return ranks.failures();
  };
  for (const std::string rank : {"rank 0", "rank 1"}) {
    EXPECT_THAT(failures([](RunConfig& run) { run.seed = 7; }),
                ::testing::ContainsRegex(rank + "[^\n]*seed is 0 on rank 0 and 7 on rank 1"));
    EXPECT_THAT(
        failures([](RunConfig& run) { run.global_batch_size = 9; }),
        ::testing::ContainsRegex(rank + "[^\n]*batch_size is 10 on rank 0 and 9 on rank 1"));
  }
  EXPECT_EQ(failures([](RunConfig&) {}), "");
}

TEST_F(TrainerTest, RefusesAnotherTextAndADamagedSnapshot) {
  Config config = this->config("a");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.resume = "auto";
  config.run.steps = 4;
  std::ofstream(folder_ + "/text", std::ios::app) << "one line more\n";
  EXPECT_THAT(run(config).failures, HasSubstr("was trained on other data"));
  std::ofstream(folder_ + "/a/step-000002/state.json") << "{\"format\": 1}";
  EXPECT_THAT(run(config).failures, HasSubstr("state.json: "));
  config.run.resume = folder_ + "/nothing";
  EXPECT_THAT(run(config).failures, HasSubstr("no snapshot there"));
}

}  // namespace
}  // namespace cadre::train
