// Tests runs whose processes have different configurations, data, weights or snapshots. All
// processes must throw the same error, which names the difference, before any file is changed.
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/torch/trainer_runs.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;

class TrainerAgreementTest : public TrainerTest {
 protected:
  TrainerAgreementTest() : config_(config("a")) { config_.run.steps = 2; }

  // Runs two ranks and returns the failures of both. `change` is applied to the configuration of
  // rank 1.
  std::string failures_with(const std::function<void(Config&)>& change) const {
    const testing::RanksResult ranks = testing::run_groups(2, [&](const ProcessGroup& group) {
      Config config = config_;
      if (group.rank() == 1) change(config);
      const auto system = os::make_native_system();
      Trainer trainer(config, {.world = group,
                               .system = *system,
                               .time_in_communication = [] { return Duration(0); },
                               .stop_is_requested = [] { return false; },
                               .print = [](std::string_view) {}});
      trainer.run();
    });
    return ranks.failures();
  }

  // Matches failures of both ranks with the same error.
  static auto refusal(const std::string& difference) {
    return AllOf(HasSubstr("rank 0: kInvalidArgument: cadre train on group "),
                 HasSubstr("rank 1: kInvalidArgument: cadre train on group "),
                 HasSubstr(": " + difference +
                           "; start all processes with the same configuration, data, weights and "
                           "snapshots"));
  }

  Config config_;
};

TEST_F(TrainerAgreementTest, EveryKeyThatIsNoPathMustBeEqual) {
  const auto expect = [this](const std::function<void(Config&)>& change,
                             const std::string& difference) {
    EXPECT_THAT(failures_with(change), refusal(difference));
    EXPECT_FALSE(fs::exists(folder_ + "/a")) << difference;
  };
  expect([](Config& config) { config.optimizer.learning_rate = 0.004; },
         "optimizer.learning_rate is 0.003 on rank 0 and 0.004 on rank 1");
  expect([](Config& config) { config.optimizer.kind = "adam"; },
         "optimizer.kind is \"adamw\" on rank 0 and \"adam\" on rank 1");
  expect([](Config& config) { config.optimizer.weight_decay = 0; },
         "optimizer.weight_decay is 0.1 on rank 0 and 0.0 on rank 1");
  expect([](Config& config) { config.optimizer.clip_norm = 0.5; },
         "optimizer.clip_norm is 1.0 on rank 0 and 0.5 on rank 1");
  expect([](Config& config) { config.schedule.kind = "constant"; },
         "schedule.kind is \"cosine\" on rank 0 and \"constant\" on rank 1");
  expect([](Config& config) { config.schedule.warmup_steps = 1; },
         "schedule.warmup_steps is 2 on rank 0 and 1 on rank 1");
  expect([](Config& config) { config.run.steps = 3; }, "run.steps is 2 on rank 0 and 3 on rank 1");
  expect([](Config& config) { config.run.accumulate = 2; },
         "run.accumulate is 1 on rank 0 and 2 on rank 1");
  expect([](Config& config) { config.run.autocast = "bfloat16"; },
         "run.autocast is \"float32\" on rank 0 and \"bfloat16\" on rank 1");
  expect([](Config& config) { config.run.keep_best = true; },
         "run.keep_best is false on rank 0 and true on rank 1");
  expect([](Config& config) { config.model.width = 32; },
         "model.width is 16 on rank 0 and 32 on rank 1");
  expect([](Config& config) { config.model.dropout_rate = 0.1; },
         "model.dropout_rate is 0.0 on rank 0 and 0.1 on rank 1");
  expect([](Config& config) { config.parallel.strategy = "fsdp"; },
         "parallel.strategy is \"ddp\" on rank 0 and \"fsdp\" on rank 1");
  expect([](Config& config) { config.data.suffixes = {".c"}; },
         "data.suffixes is [] on rank 0 and [\".c\"] on rank 1");
  expect([&](Config& config) { config.parallel.offload = folder_; },
         "parallel.offload is \"none\" on rank 0 and \"a folder\" on rank 1");
}

TEST_F(TrainerAgreementTest, PathsMayDifferIfTheirContentDoesNot) {
  fs::copy_file(folder_ + "/text", folder_ + "/copy");
  EXPECT_EQ(failures_with([&](Config& config) { config.data.path = folder_ + "/copy"; }), "");
}

TEST_F(TrainerAgreementTest, AnotherTextOfTheSameSizeIsRefused) {
  std::string text = content_of(folder_ + "/text");
  text[0] ^= 1;
  write_content(folder_ + "/other", text);
  const auto other = [&](Config& config) { config.data.path = folder_ + "/other"; };
  EXPECT_THAT(failures_with(other),
              AllOf(HasSubstr("rank 0: "), HasSubstr("rank 1: "),
                    ::testing::ContainsRegex("the digest of the data is [0-9a-f]+ on rank 0 and "
                                             "[0-9a-f]+ on rank 1; start all")));
  write_content(folder_ + "/other", text + "more\n");
  EXPECT_THAT(failures_with(other),
              ::testing::ContainsRegex("the number of tokens of the data is [0-9]+ on rank 0"));
}

TEST_F(TrainerAgreementTest, OtherWeightsAreRefused) {
  ASSERT_EQ(run(config_).failures, "");
  fs::rename(folder_ + "/a", folder_ + "/first");
  config_.run.seed = 3;
  ASSERT_EQ(run(config_).failures, "");
  fs::rename(folder_ + "/a", folder_ + "/second");
  config_.model.weights = folder_ + "/first/step-000002";
  EXPECT_THAT(failures_with(
                  [&](Config& config) { config.model.weights = folder_ + "/second/step-000002"; }),
              ::testing::ContainsRegex("the digest of model.weights is [0-9a-f]+ of [0-9]+ bytes "
                                       "on rank 0 and [0-9a-f]+ of [0-9]+ bytes on rank 1"));
  EXPECT_THAT(failures_with([](Config& config) { config.model.weights = ""; }),
              HasSubstr(" bytes on rank 0 and none on rank 1; "));
  EXPECT_FALSE(fs::exists(folder_ + "/a"));
}

// Rank 1 of 2 reads another copy of the snapshot, with the same B2SUMS. One of three shards is
// damaged, the second; rank 1 reads a part of it under every strategy.
TEST_F(TrainerAgreementTest, DamageToTheCopyThatOneRankReadsIsFound) {
  config_.parallel.strategy = "fsdp";
  ASSERT_EQ(run(config_, 3).failures, "");
  fs::rename(folder_ + "/a", folder_ + "/first");
  const std::string whole = folder_ + "/first/step-000002";
  const std::string copy = folder_ + "/copy";
  fs::copy(whole, copy, fs::copy_options::recursive);
  const std::string damaged = copy + "/shard-00002-model-00001-of-00001.safetensors";
  std::string content = content_of(damaged);
  content.back() ^= 1;
  write_content(damaged, content);
  const auto is_damage =
      AllOf(HasSubstr("rank 0: kCorruption: "), HasSubstr("rank 1: kCorruption: "),
            HasSubstr(damaged + ": its bytes do not match its digest"));
  for (const std::string strategy : {"fsdp", "zero2", "ddp"}) {
    config_.parallel.strategy = strategy;
    config_.model.weights = whole;
    config_.run.resume = "none";
    EXPECT_THAT(failures_with([&](Config& config) { config.model.weights = copy; }), is_damage)
        << strategy;
    config_.model.weights = "";
    config_.run.resume = whole;
    config_.run.steps = 3;
    EXPECT_THAT(failures_with([&](Config& config) { config.run.resume = copy; }), is_damage)
        << strategy;
    EXPECT_FALSE(fs::exists(folder_ + "/a"));
  }
}

TEST_F(TrainerAgreementTest, DamagedWeightsInASnapshotOfWholeFilesAreRefused) {
  ASSERT_EQ(run(config_).failures, "");
  fs::rename(folder_ + "/a", folder_ + "/first");
  const std::string file = folder_ + "/first/step-000002/model.safetensors";
  std::string content = content_of(file);
  content.back() ^= 1;
  write_content(file, content);
  config_.model.weights = folder_ + "/first/step-000002";
  EXPECT_THAT(
      failures_with([](Config&) {}),
      AllOf(HasSubstr("kCorruption: "), HasSubstr(file + ": its bytes do not match its digest")));
  EXPECT_FALSE(fs::exists(folder_ + "/a"));
}

// A System that calls `change` when the time is read for the first time. At that moment the digests
// of the weights have been compared, but the weights are not loaded yet.
class ChangingSystem : public testing::ForwardingSystem {
 public:
  ChangingSystem(os::System& inner, std::function<void()> change)
      : ForwardingSystem(inner), change_(std::move(change)) {}
  TimePoint now() override {
    if (change_) std::exchange(change_, nullptr)();
    return ForwardingSystem::now();
  }

 private:
  std::function<void()> change_;
};

TEST_F(TrainerAgreementTest, WeightsThatChangeBeforeTheyAreLoadedAreRefused) {
  ASSERT_EQ(run(config_).failures, "");
  fs::rename(folder_ + "/a", folder_ + "/first");
  const std::string file = folder_ + "/weights.safetensors";
  fs::copy_file(folder_ + "/first/step-000002/model.safetensors", file);
  config_.model.weights = file;
  std::string content = content_of(file);
  content[content.size() - 1] ^= 1;
  for (const std::string strategy : {"fsdp", "ddp"}) {
    config_.parallel.strategy = strategy;
    for (const bool is_replaced : {false, true}) {
      const testing::RanksResult ranks = testing::run_groups(1, [&](const ProcessGroup& group) {
        const auto system = os::make_native_system();
        ChangingSystem changing(*system, [&] {
          write_content(is_replaced ? file + ".new" : file, content);
          if (is_replaced) fs::rename(file + ".new", file);
        });
        Trainer trainer(config_, {.world = group,
                                  .system = changing,
                                  .time_in_communication = [] { return Duration(0); },
                                  .stop_is_requested = [] { return false; },
                                  .print = [](std::string_view) {}});
      });
      EXPECT_THAT(ranks.failures(),
                  AllOf(HasSubstr("kInvalidArgument: model.weights: " + file),
                        HasSubstr(is_replaced ? "was replaced by another file between"
                                              : "was written between")))
          << strategy;
      EXPECT_FALSE(fs::exists(folder_ + "/a"));
    }
  }
}

TEST_F(TrainerAgreementTest, AnotherSnapshotIsRefused) {
  config_.run.snapshot_every = 1;
  ASSERT_EQ(run(config_).failures, "");
  config_.run.steps = 3;
  config_.run.resume = "auto";
  EXPECT_THAT(
      failures_with([&](Config& config) { config.run.resume = folder_ + "/a/step-000001"; }),
      ::testing::ContainsRegex("the snapshot of run.resume is that of step 2 with the digest "
                               "[0-9a-f]+ on rank 0 and that of step 1 with the digest"));
  EXPECT_THAT(failures_with([](Config& config) { config.run.resume = "none"; }),
              HasSubstr(" on rank 0 and none on rank 1; "));
  EXPECT_THAT(SnapshotFolder(folder_ + "/a").steps(), ::testing::ElementsAre(1, 2));
}

// If one rank cannot open its data, whatever the error is, all ranks throw an error that names that
// rank.
TEST_F(TrainerAgreementTest, ARefusalOfOneRankNamesIt) {
  EXPECT_THAT(failures_with([&](Config& config) { config.data.path = folder_ + "/nothing"; }),
              AllOf(HasSubstr("rank 0: kInvalidArgument: data.path: there is no file or folder " +
                              folder_ + "/nothing (on rank 1 of 2)"),
                    HasSubstr("rank 1: kInvalidArgument: data.path: there is no file or folder ")));
}

}  // namespace
}  // namespace cadre::train
