// Tests the files that a run leaves if it fails, goes back to an earlier step, or continues with
// other settings.
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/checkpoint/file_digests.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainerEndTest : public TrainerTest {
 protected:
  // Returns the configuration of a run of two processes. `way` is a strategy, or "tensor" for a
  // divided model.
  Config config_of(const std::string& way, const std::string& name = "a") const {
    Config config = TrainerTest::config(name);
    config.run.steps = 3;
    if (way == "tensor") {
      config.parallel.tensor = 2;
    } else {
      config.parallel.strategy = way;
    }
    return config;
  }

  std::vector<int64_t> steps(const std::string& name = "a") const {
    return SnapshotFolder(folder_ + "/" + name).steps();
  }

  // Lets the run end while it prints this line, as if it were killed.
  void kill_at(const std::string& line) {
    on_print_ = [line](std::string_view text) {
      if (text.starts_with(line)) throw std::runtime_error("killed");
    };
  }
  void kill_no_more() {
    on_print_ = [](std::string_view) {};
  }
};

// Generation fails, because the number of candidates is invalid. The test bypasses load_config(),
// which would find this earlier.
TEST_F(TrainerEndTest, AnErrorWhileTheTextIsGeneratedLosesNothing) {
  for (const std::string way : {"ddp", "zero1", "fsdp", "tensor"}) {
    SCOPED_TRACE(way);
    Config config = config_of(way, way);
    config.sample.top_k = -1;
    const Run run = this->run(config, 2);
    EXPECT_EQ(run.failures, "");
    EXPECT_THAT(run.screen,
                AllOf(HasSubstr("held-out loss "), HasSubstr("warning: no text was generated: ")));
    EXPECT_THAT(steps(way), ElementsAre(3));
  }
}

TEST_F(TrainerEndTest, ATemperatureNearZeroChoosesTheMostLikelyToken) {
  Config config = config_of("ddp");
  config.sample = {.tokens = 20, .temperature = 0, .top_k = 0};
  const std::string expected = run(config).screen;
  config.sample.temperature = 1e-30;
  const std::string actual = run(config).screen;
  const auto text_of = [](const std::string& screen) {
    return screen.substr(screen.find("a sample:\n"), 25);
  };
  ASSERT_THAT(expected, HasSubstr("a sample:\n"));
  EXPECT_EQ(text_of(actual), text_of(expected));
}

// The loss of step 2 is NaN or infinite while the snapshot of step 1 is still being written. That
// snapshot must be completed.
TEST_F(TrainerEndTest, AFailedStepLosesNoSnapshotThatIsBeingWritten) {
  for (const std::string way : {"zero1", "fsdp", "tensor"}) {
    SCOPED_TRACE(way);
    Config config = config_of(way, way);
    config.optimizer = {.kind = "sgd", .learning_rate = 1e30, .clip_norm = 0};
    config.schedule = {.kind = "constant", .warmup_steps = 0};
    config.run.snapshot_every = 1;
    EXPECT_THAT(run(config, 2).failures, HasSubstr("step 2: the loss is"));
    EXPECT_THAT(steps(way), ElementsAre(1));
    EXPECT_NO_THROW(check_snapshot(snapshot(way, 1)));
  }
}

TEST_F(TrainerEndTest, AfterGoingBackAKilledRunContinuesFromThere) {
  Config config = config_of("ddp");
  config.run.steps = 6;
  config.run.snapshot_every = 2;
  ASSERT_EQ(run(config).failures, "");
  config.run.steps = 7;
  config.run.resume = snapshot("a", 2);
  config.optimizer.learning_rate = 0.001;
  kill_at("step 3/");
  EXPECT_THAT(run(config).failures, HasSubstr("killed"));
  kill_no_more();
  config.run.resume = "auto";
  const Run resumed = run(config);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, HasSubstr("resuming from " + snapshot("a", 2) + "\n"));
  EXPECT_THAT(steps(), ElementsAre(2, 4, 6, 7));
  // The snapshots that were moved to abandoned.1 are complete.
  EXPECT_THAT(steps("a/abandoned.1"), ElementsAre(4, 6));
  EXPECT_NO_THROW(check_snapshot(snapshot("a/abandoned.1", 6)));
  EXPECT_EQ(losses("a/abandoned.1").size(), 6U);
  EXPECT_EQ(losses("a").size(), 7U);
}

TEST_F(TrainerEndTest, GoingBackIsSaidAndWithoutAStepNothingIsMoved) {
  Config config = config_of("fsdp");
  config.run.steps = 6;
  config.run.snapshot_every = 2;
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.resume = snapshot("a", 4);
  config.run.steps = 4;
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_THAT(steps(), ElementsAre(2, 4, 6));
  config.run.steps = 5;
  const Run back = run(config, 2);
  ASSERT_EQ(back.failures, "");
  EXPECT_THAT(back.screen, HasSubstr("the snapshots and metrics of later steps were moved to " +
                                     folder_ + "/a/abandoned.1\n"));
  EXPECT_THAT(steps(), ElementsAre(2, 4, 5));
  config.run.resume = snapshot("a", 2);
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_THAT(steps("a/abandoned.1"), ElementsAre(6));
  EXPECT_THAT(steps("a/abandoned.2"), ElementsAre(4, 5));
}

// If a run goes back to a step before the best snapshot, the best one of the remaining snapshots is
// marked.
TEST_F(TrainerEndTest, GoingBackBehindTheBestMarksTheOneBefore) {
  Config config = config_of("ddp");
  config.run.steps = 8;
  config.run.evaluate_every = 2;
  config.run.keep_best = true;
  config.optimizer.learning_rate = 0.01;
  ASSERT_EQ(run(config).failures, "");
  ASSERT_THAT(steps(), ElementsAre(2, 4, 6, 8))
      << "each snapshot has a lower loss than the one before";
  SnapshotFolder snapshots(folder_ + "/a");
  EXPECT_EQ(snapshots.best(), snapshots.path_of(8));
  config.run.resume = snapshots.path_of(4);
  config.optimizer.learning_rate = 0;
  config.run.evaluate_every = 0;
  config.run.steps = 5;
  ASSERT_EQ(run(config).failures, "");
  EXPECT_EQ(snapshots.best(), snapshots.path_of(4));
}

// The last snapshot also records the best loss, so a resumed run marks a snapshot only if its loss
// is lower.
TEST_F(TrainerEndTest, TheLastSnapshotKnowsTheBestLoss) {
  Config config = config_of("fsdp");
  config.run.keep_best = true;
  const Run run = this->run(config, 2);
  ASSERT_EQ(run.failures, "");
  EXPECT_EQ(read_train_state(snapshot("a", 3)).best_held_out_loss, run.result.held_out.loss);
  EXPECT_EQ(SnapshotFolder(folder_ + "/a").best(), snapshot("a", 3));
}

// The error must name the optimizer settings that differ, and must not call the snapshot damaged.
TEST_F(TrainerEndTest, AnotherMomentumIsNoDamage) {
  const auto refusal_of = [this](const std::string& kind, double before, double now,
                                 const std::string& way) {
    const std::string name = kind + way + std::to_string(before);
    Config config = config_of(way, name);
    config.optimizer = default_optimizer(kind);
    config.optimizer.momentum = before;
    config.run.snapshot_every = 1;
    EXPECT_EQ(run(config, 2).failures, "");
    config.optimizer.momentum = now;
    config.run.steps = 4;
    config.run.resume = "auto";
    return run(config, 2).failures;
  };
  const auto refused = [](const std::string& sentence) {
    return AllOf(HasSubstr("rank 0: kInvalidArgument: " + sentence),
                 HasSubstr("rank 1: kInvalidArgument: " + sentence), Not(HasSubstr("intact")));
  };
  for (const std::string way : {"ddp", "fsdp"}) {
    for (const std::string kind : {"sgd", "rmsprop"}) {
      SCOPED_TRACE(kind + ", " + way);
      EXPECT_THAT(refusal_of(kind, 0.5, 0, way),
                  refused("optimizer.momentum was 0.5 when the snapshot was written and is 0.0 "
                          "now: the saved states are those of an optimizer with momentum; restore "
                          "it, or start at step 0 with run.resume=none"));
      EXPECT_THAT(refusal_of(kind, 0, 0.5, way),
                  refused("optimizer.momentum was 0.0 when the snapshot was written and is 0.5 "
                          "now: the saved states are those of an optimizer without momentum"));
    }
  }
  EXPECT_EQ(refusal_of("sgd", 0.9, 0.5, "ddp"), "")
      << "a momentum above 0 may change, because the saved states are the same";
}

// The bytes of the snapshot are intact, so the error must not call it damaged.
TEST_F(TrainerEndTest, AGeneratorOfAnotherLibtorchIsNoDamage) {
  Config config = config_of("ddp");
  config.run.snapshot_every = 1;
  ASSERT_EQ(run(config).failures, "");
  const std::string latest = snapshot("a", 3);
  nlohmann::json state = nlohmann::json::parse(std::ifstream(latest + "/state.json"));
  state["generators"][0] = "00";
  std::ofstream(latest + "/state.json") << state.dump();
  write_digests(latest, std::vector<std::string_view>{kModelFile, kOptimizerFile, "state.json"})
      .value_or_throw();
  config.run.resume = "auto";
  config.run.steps = 4;
  EXPECT_THAT(run(config).failures,
              AllOf(HasSubstr("kInvalidArgument: " + latest + ": a generator's state has 1 bytes"),
                    HasSubstr("another version of libtorch"), Not(HasSubstr("intact"))));
}

}  // namespace
}  // namespace cadre::train
