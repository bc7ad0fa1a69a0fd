// Tests sharded snapshots of the trainer: resumed under every strategy, damaged, and written to a
// full disk.
#include <gmock/gmock.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/checkpoint/sharded_save.h"
#include "cadre/train/trainer/run/run_setup.h"
#include "cadre/train/trainer/snapshots/snapshot_writer.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kStopStep = 5;
constexpr int64_t kLastStep = 8;

struct Way {
  std::string strategy;
  int world_size = 1;
};

// The strategies with their numbers of processes. hsdp has two replicas of two processes each.
const std::vector<Way> kWays = {{"single", 1}, {"ddp", 2},  {"zero1", 3},
                                {"zero2", 2},  {"fsdp", 3}, {"hsdp", 4}};

std::string name_of(const Way& way) {
  return way.strategy + std::to_string(way.world_size);
}

class TrainerPartsTest : public TrainerTest {
 protected:
  Config config_of(const std::string& strategy, const std::string& name) const {
    Config config = this->config(name);
    config.parallel.strategy = strategy;
    config.run.accumulate = 2;
    config.run.steps = kLastStep;
    config.sample.tokens = 0;
    return config;
  }

  void copy_run(const std::string& from, const std::string& to) const {
    fs::copy(folder_ + "/" + from, folder_ + "/" + to, fs::copy_options::recursive);
  }

  std::vector<std::string> files_of(const std::string& run_name, int64_t step) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(snapshot(run_name, step))) {
      names.push_back(entry.path().filename());
    }
    std::ranges::sort(names);
    return names;
  }
};

TEST_F(TrainerPartsTest, EveryRankWritesWhatItHas) {
  ASSERT_EQ(run(config_of("fsdp", "fsdp"), 2).failures, "");
  EXPECT_THAT(files_of("fsdp", kLastStep),
              ElementsAre("B2SUMS", "manifest.json", "shard-00001-model-00001-of-00001.safetensors",
                          "shard-00001-optimizer-00001-of-00001.safetensors",
                          "shard-00002-model-00001-of-00001.safetensors",
                          "shard-00002-optimizer-00001-of-00001.safetensors"));
  const TrainState state = read_train_state(snapshot("fsdp", kLastStep));
  EXPECT_EQ(state.format, 4);
  EXPECT_EQ(state.step, kLastStep);
  EXPECT_EQ(state.generators.size(), 2U);
  check_snapshot(snapshot("fsdp", kLastStep));
}

// The losses after resuming must equal those of an uninterrupted run of one process.
TEST_F(TrainerPartsTest, EveryStrategyGoesOnFromEveryOther) {
  ASSERT_EQ(run(config_of("single", "alone")).failures, "");
  std::vector<std::pair<Way, Way>> pairs;
  for (const Way& before : kWays) {
    for (const Way& after : kWays) pairs.emplace_back(before, after);
  }
  for (const auto& [before, after] : testing::share_of(pairs)) {
    SCOPED_TRACE(name_of(before) + " to " + name_of(after));
    const std::string stopped = "stopped_" + name_of(before);
    if (!fs::exists(folder_ + "/" + stopped)) {
      const Run run = this->run(config_of(before.strategy, stopped), before.world_size, kStopStep);
      ASSERT_TRUE(run.result.was_stopped) << run.failures;
    }
    const std::string name = name_of(before) + "_" + name_of(after);
    copy_run(stopped, name);
    Config config = config_of(after.strategy, name);
    config.run.resume = "auto";
    ASSERT_EQ(run(config, after.world_size).failures, "");
    expect_near(losses(name), losses("alone"));
  }
}

TEST_F(TrainerPartsTest, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(name_of(way));
    const std::string whole = "whole_" + name_of(way);
    const std::string parts = "parts_" + name_of(way);
    ASSERT_EQ(run(config_of(way.strategy, whole), way.world_size).failures, "");
    Config config = config_of(way.strategy, parts);
    ASSERT_TRUE(run(config, way.world_size, kStopStep).result.was_stopped);
    config.run.resume = "auto";
    ASSERT_EQ(run(config, way.world_size).failures, "");
    EXPECT_EQ(losses(parts), losses(whole));
    expect_same_bits(whole, parts, kLastStep);
  }
}

TEST_F(TrainerPartsTest, EveryOptimizersStateGoesThroughParts) {
  for (const std::string kind : {"adamw", "sgd", "adagrad", "rmsprop", "adadelta"}) {
    SCOPED_TRACE(kind);
    const auto unclipped = [&](const std::string& strategy, const std::string& name) {
      Config config = config_of(strategy, name + kind);
      config.optimizer = default_optimizer(kind);
      config.optimizer.clip_norm = 0;  // clipping would change the last bits
      return config;
    };
    ASSERT_EQ(run(unclipped("ddp", "whole_"), 2).failures, "");
    ASSERT_TRUE(run(unclipped("fsdp", "parts_"), 2, kStopStep).result.was_stopped);
    Config resumed = unclipped("zero2", "parts_");
    resumed.run.resume = "auto";
    ASSERT_EQ(run(resumed, 2).failures, "");
    expect_same_bits("whole_" + kind, "parts_" + kind, kLastStep);
  }
}

TEST_F(TrainerPartsTest, DamageIsFoundWithTheFileAndAnotherSnapshot) {
  Config config = config_of("fsdp", "a");
  config.run.steps = 4;
  config.run.snapshot_every = 2;
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.resume = "auto";
  config.run.steps = 5;
  const std::string remedy = "another snapshot is intact: run.resume=" + snapshot("a", 2);
  for (const std::string& name : files_of("a", 4)) {
    const fs::path path = snapshot("a", 4) + "/" + name;
    const std::string whole = content_of(path);
    std::string damaged = whole;
    damaged[damaged.size() / 2] ^= 1;
    write_content(path, damaged);
    const std::string named = name == "B2SUMS" ? "B2SUMS" : path.string();
    EXPECT_THAT(run(config, 2).failures, AllOf(HasSubstr(named), HasSubstr(remedy))) << name;
    fs::remove(path);
    EXPECT_THAT(run(config, 3).failures, HasSubstr(remedy)) << name << " is missing";
    write_content(path, whole);
  }
  // The error must not recommend another snapshot that is damaged, too.
  fs::remove(snapshot("a", 4) + "/" + files_of("a", 4)[2]);
  fs::remove(snapshot("a", 2) + "/" + files_of("a", 2)[3]);
  EXPECT_THAT(
      run(config, 2).failures,
      AllOf(HasSubstr("no other snapshot is intact: start at step 0"), Not(HasSubstr(remedy))));
}

TEST_F(TrainerPartsTest, ASnapshotOfAnotherStepOrProgramIsRefused) {
  Config config = config_of("zero1", "a");
  config.run.steps = 2;
  ASSERT_EQ(run(config, 2).failures, "");
  fs::rename(snapshot("a", 2), snapshot("a", 3));
  config.run.resume = snapshot("a", 3);
  EXPECT_THAT(run(config).failures, HasSubstr("its step is 2, but its folder is named step-"));

  SnapshotFolder other(folder_ + "/other");
  save_sharded(other, 7, {});
  config.run.resume = other.path_of(7);
  EXPECT_THAT(run(config).failures, AllOf(HasSubstr("kInvalidArgument"),
                                          HasSubstr("the trainer did not write this snapshot"),
                                          HasSubstr("use it as model.weights instead")));
}

TEST_F(TrainerPartsTest, WeightsComeFromTheFolderOfASnapshot) {
  Config config = config_of("fsdp", "a");
  ASSERT_EQ(run(config, 2).failures, "");
  config = config_of("single", "b");
  config.model.weights = snapshot("a", kLastStep);
  config.schedule.warmup_steps = 0;
  config.run.steps = 1;
  ASSERT_EQ(run(config).failures, "");
  config.run.name = "c";
  config.model.weights = folder_ + "/full.safetensors";
  write_full_state(snapshot("a", kLastStep), config.model.weights);
  ASSERT_EQ(run(config).failures, "");
  EXPECT_EQ(losses("b"), losses("c"));
  EXPECT_LT(losses("b").at(0), losses("a").at(0));

  // The weights are loaded directly into shards; no rank ever holds the whole model.
  for (const std::string& weights : {snapshot("a", kLastStep), config.model.weights}) {
    config = config_of("fsdp", "d");
    config.model.weights = weights;
    config.schedule.warmup_steps = 0;
    config.run.steps = 1;
    ASSERT_EQ(run(config, 2).failures, "");
    EXPECT_NEAR(losses("d").at(0), losses("b").at(0), 1e-5) << weights;
  }
  config.model.weights = folder_ + "/nothing";
  EXPECT_THAT(run(config, 2).failures, AllOf(HasSubstr("nothing"), HasSubstr("kInvalidArgument")));
}

// The model is constructed deferred, so that no rank ever has memory for the values of the whole
// model.
TEST_F(TrainerPartsTest, AShardedModelIsConstructedDeferred) {
  const Config config = config_of("fsdp", "a");
  const auto system = os::make_native_system();
  const auto task = open_task(config, system->deadline_in(kTextSourceTimeout));
  const auto whole = make_initial_model(config, *task);
  const auto deferred = make_deferred_model(*task);
  for (const auto& item : deferred->named_parameters()) {
    EXPECT_TRUE(is_deferred(item.value())) << item.key();
  }
  materialize(*deferred);
  const auto values = deferred->named_parameters();
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(torch::equal(values[item.key()], item.value())) << item.key();
  }
}

TEST_F(TrainerPartsTest, AFailedSnapshotIsSaidAndTrainingGoesOn) {
  Config config = config_of("fsdp", "a");
  config.run.steps = 2;
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.steps = 6;
  config.run.snapshot_every = 2;
  config.run.resume = "auto";
  std::optional<testing::FileSizeLimit> disk;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step 4/")) disk.emplace(1024);
    if (text.starts_with("warning: saved in")) disk.reset();
  };
  const Run second = run(config, 2);
  ASSERT_EQ(second.failures, "");
  EXPECT_THAT(second.screen, AllOf(HasSubstr("warning: saved in the background: "),
                                   HasSubstr("snapshot of step 4: "),
                                   HasSubstr("; earlier snapshots are untouched")));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ElementsAre(2, 6));
}

TEST_F(TrainerPartsTest, ARunWhoseLastSnapshotFailsEndsWithAnError) {
  Config config = config_of("zero2", "a");
  config.run.steps = 2;
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.steps = 6;
  config.run.resume = "auto";
  std::optional<testing::FileSizeLimit> disk;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("step 6")) disk.emplace(1024);
    if (text.starts_with("warning: saved in")) disk.reset();
  };
  EXPECT_THAT(run(config, 2).failures,
              AllOf(HasSubstr("rank 0: "), HasSubstr("rank 1: "),
                    HasSubstr("step 6, whose snapshot could not be written; the last one is of "
                              "step 2")));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ElementsAre(2));
}

TEST(UnsavedEnd, DiskSpaceIsNamedOnlyWhereItHelps) {
  UnsavedEnd end{.step = 4,
                 .run_folder = "runs/a",
                 .cause = Error(ErrorCode::kUnavailable, "snapshot of step 4: the disk is full")};
  EXPECT_EQ(
      testing::failure_of([&] { throw unsaved_end(end); }),
      "kUnavailable: the run ended at step 4, but no snapshot could be written, so its result "
      "is lost: free disk space in runs/a, or choose another run.folder, and start it again");
  end.cause = Error(ErrorCode::kInvalidArgument, "snapshot of step 4: 'w': no tensor");
  EXPECT_EQ(
      testing::failure_of([&] { throw unsaved_end(end); }),
      "kInternal: the run ended at step 4, but no snapshot could be written, so its result is "
      "lost: snapshot of step 4: 'w': no tensor; report this with the configuration");
  end.saved_step = 2;
  EXPECT_EQ(testing::failure_of([&] { throw unsaved_end(end); }),
            "kInternal: the run ended at step 4, whose snapshot could not be written; the last one "
            "is of step 2: snapshot of step 4: 'w': no tensor; report this with the configuration");
}

TEST_F(TrainerPartsTest, TheBestIsMarkedWhenItIsThereAndForgottenWhenItIsNot) {
  Config config = config_of("fsdp", "a");
  // This rate never lets the loss fall below that of the first evaluation.
  config.optimizer.learning_rate = 0;
  config.run.evaluate_every = 2;
  config.run.keep_best = true;
  std::optional<testing::FileSizeLimit> disk;
  bool has_failed = false;
  on_print_ = [&](std::string_view text) {
    if (text.starts_with("held-out") && !has_failed) disk.emplace(1024);
    if (!text.starts_with("warning: saved in")) return;
    has_failed = true;
    disk.reset();
  };
  ASSERT_EQ(run(config, 2).failures, "");
  // The first snapshot could not be written, so the second one is marked as the best. A run always
  // saves its last step, which is 8 here.
  const SnapshotFolder snapshots(folder_ + "/a");
  EXPECT_THAT(snapshots.steps(), ElementsAre(4, 8));
  EXPECT_EQ(snapshots.best(), snapshots.path_of(4));
}

}  // namespace
}  // namespace cadre::train
