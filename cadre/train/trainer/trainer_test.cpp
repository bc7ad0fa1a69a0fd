#include "cadre/testing/torch/trainer_runs.h"

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/checkpoint/safetensors.h"

namespace cadre::train {
namespace {

namespace fs = std::filesystem;

using ::testing::HasSubstr;

TEST_F(TrainerTest, LearnsAndTellsWhatItDoes) {
  Config config = this->config("a");
  config.run.steps = 60;
  config.optimizer.learning_rate = 0.01;
  const Run run = this->run(config);
  ASSERT_EQ(run.failures, "");
  EXPECT_LT(run.result.held_out.loss, 3.0);
  EXPECT_GT(losses("a").front(), 5.0);
  EXPECT_THAT(run.screen, ::testing::ContainsRegex("step 60/60  loss [0-9.]+  [0-9.]+k? tokens/s  "
                                                   "comm +[0-9]+ %  [0-9]+ MB  0:00 left\n"));
  EXPECT_THAT(run.screen, HasSubstr("nats (bigram conditional entropy"));
  EXPECT_THAT(run.screen, HasSubstr("a sample:\n"));
  EXPECT_THAT(run.screen, ::testing::ContainsRegex("\nloss 5[.][0-9]+ █[^\n]*▁ [0-9.]+\n"));
  const std::string picture = folder_ + "/a/loss.svg";
  EXPECT_THAT(run.screen, HasSubstr("\nthe loss as a picture: " + picture + "\n"));
  EXPECT_THAT(content_of(picture), HasSubstr("</svg>"));
  ASSERT_EQ(metrics("a").size(), 61u);
  EXPECT_EQ(metrics("a")[59]["step"], 60);
  EXPECT_EQ(metrics("a")[60]["held_out_loss"], run.result.held_out.loss);
}

TEST_F(TrainerTest, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  // A text of 700 lines has so few samples that each run passes the end of an epoch.
  for (const int world_size : {1, 2}) {
    SCOPED_TRACE(world_size);
    const std::string whole = "whole" + std::to_string(world_size);
    const std::string parts = "parts" + std::to_string(world_size);
    Config config = this->config(whole);
    config.run.steps = 150;
    config.run.snapshot_every = 50;
    ASSERT_EQ(run(config, world_size).failures, "");

    config.run.name = parts;
    const Run stopped = run(config, world_size, /*stop_after=*/97);
    ASSERT_EQ(stopped.failures, "");
    EXPECT_TRUE(stopped.result.was_stopped);
    EXPECT_EQ(stopped.result.steps, 97);
    EXPECT_THAT(stopped.screen, HasSubstr("stopped after step 97 on request"));
    config.run.resume = "auto";
    const Run resumed = run(config, world_size);
    ASSERT_EQ(resumed.failures, "");
    EXPECT_THAT(resumed.screen,
                HasSubstr("resuming from " + folder_ + "/" + parts + "/step-000097\n"));
    expect_same_bits(whole, parts, 150);
    EXPECT_EQ(losses(parts), losses(whole));
  }
}

// Tests that a resumed run uses the bucket layout in the snapshot. The layout that DDP learns in
// the first step usually equals the initial one, so the test stores a different layout in the
// snapshot. The layout changes the resulting bits only over TCP, with three ranks and more than 64
// KiB: there the order of additions depends on a gradient's position in its bucket.
TEST_F(TrainerTest, AResumedRunTakesOverTheBucketLayout) {
  transport_ = TransportChoice::kTcp;
  Config config = this->config("whole");
  config.model = {.layers = 2, .heads = 2, .width = 64, .context = 16};
  config.schedule.kind = "constant";
  ASSERT_EQ(run(config, 3).failures, "");
  const auto state_of = [&](const std::string& snapshot) {
    return nlohmann::json::parse(std::ifstream(folder_ + "/" + snapshot + "/state.json"));
  };
  const std::string learned = state_of("whole/step-000012")["bucket_layout"];
  const auto num_parameters = tensors("whole", 12, "model.safetensors").size();
  std::string ascending = "float32:0";
  for (size_t i = 1; i < num_parameters; ++i) ascending += cadre::format(",{}", i);
  ASSERT_NE(learned, ascending);

  for (const std::string& layout : {learned, ascending}) {
    config.run.name = layout == learned ? "same" : "other";
    config.run.resume = "none";
    ASSERT_TRUE(run(config, 3, /*stop_after=*/5).result.was_stopped);
    const std::string snapshot = config.run.name + "/step-000005";
    // Format 2 has no digests, so the changed file is accepted.
    set_format(folder_ + "/" + snapshot, 2);
    nlohmann::json state = state_of(snapshot);
    EXPECT_EQ(state["bucket_layout"], learned);
    state["bucket_layout"] = layout;
    std::ofstream(folder_ + "/" + snapshot + "/state.json") << state.dump();
    config.run.resume = "auto";
    ASSERT_EQ(run(config, 3).failures, "");
    EXPECT_EQ(state_of(config.run.name + "/step-000012")["bucket_layout"], layout);
  }
  expect_same_bits("whole", "same", 12);
  size_t num_different = 0;
  const std::vector<NamedTensor> expected = tensors("whole", 12, "model.safetensors");
  const std::vector<NamedTensor> actual = tensors("other", 12, "model.safetensors");
  for (size_t i = 0; i < expected.size(); ++i) {
    num_different += expected[i].tensor.equal(actual[i].tensor) ? 0 : 1;
  }
  EXPECT_GT(num_different, 0u) << "the layout has not changed any bit, so this test proves nothing";
}

TEST_F(TrainerTest, AnyNumberOfRanksTakesTheSameSteps) {
  Config config = this->config("one");
  config.run.global_batch_size = 11;  // 11 samples give the ranks shares of different sizes
  ASSERT_EQ(run(config, 1).failures, "");
  const std::vector<double> expected = losses("one");
  ASSERT_EQ(expected.size(), 12u);
  for (const int world_size : {2, 3}) {
    config.run.name = "many" + std::to_string(world_size);
    const Run many = run(config, world_size);
    ASSERT_EQ(many.failures, "");
    expect_near(losses(config.run.name), expected);
  }
}

class ImageTrainerTest : public TrainerTest {
 protected:
  Config config(const std::string& name) const {
    Config config = TrainerTest::config(name);
    config.model = {.kind = "cnn", .dropout = false};
    config.data = {.kind = "synthetic", .held_out = 0.2, .samples = 120};
    config.optimizer = default_optimizer("adam");
    config.run.steps = 6;
    return config;
  }
};

TEST_F(ImageTrainerTest, LearnsAndTellsHowManyAreRight) {
  Config config = this->config("a");
  config.run.epochs = 5;
  config.run.global_batch_size = 8;  // 12 batches in the 96 samples
  const Run run = this->run(config, 2);
  ASSERT_EQ(run.failures, "");
  EXPECT_EQ(run.result.steps, 60);
  EXPECT_GT(run.result.held_out.accuracy.value(), 0.9);
  EXPECT_THAT(run.screen, HasSubstr("cnn of 1199882 parameters on 96 images (synthetic; "
                                    "24 held out); 60 steps of 8 samples\n"));
  EXPECT_THAT(run.screen, ::testing::ContainsRegex("[0-9.]+k? samples/s"));
  EXPECT_THAT(run.screen,
              ::testing::ContainsRegex("held-out loss [0-9.]+ nats, accuracy [0-9.]+ %"));
  EXPECT_EQ(metrics("a")[60]["accuracy"], *run.result.held_out.accuracy);
}

TEST_F(ImageTrainerTest, AnyNumberOfRanksTakesTheSameSteps) {
  for (const std::string kind : {"cnn", "mlp"}) {
    Config config = this->config(kind + "1");
    config.model.kind = kind;
    config.run.global_batch_size = 7;  // 7 samples give the ranks shares of different sizes
    ASSERT_EQ(run(config, 1).failures, "");
    const std::vector<double> expected = losses(config.run.name);
    ASSERT_EQ(expected.size(), 6u);
    for (const int world_size : {2, 4}) {
      config.run.name = kind + std::to_string(world_size);
      ASSERT_EQ(run(config, world_size).failures, "");
      expect_near(losses(config.run.name), expected);
    }
  }
}

TEST_F(ImageTrainerTest, AResumedRunWithDropoutHasTheBitsOfAnUninterruptedOne) {
  Config config = this->config("whole");
  config.model.dropout = true;
  torch::manual_seed(5);
  ASSERT_EQ(run(config).failures, "");
  config.run.name = "parts";
  torch::manual_seed(5);
  ASSERT_TRUE(run(config, 1, /*stop_after=*/3).result.was_stopped);
  torch::manual_seed(99);  // the generator has another state, as in a new process
  config.run.resume = "auto";
  ASSERT_EQ(run(config).failures, "");
  expect_same_bits("whole", "parts", 6);
  EXPECT_EQ(losses("parts"), losses("whole"));
}

TEST_F(TrainerTest, AResumedRunMayHaveAnotherNumberOfRanks) {
  Config config = this->config("whole");
  config.optimizer = default_optimizer("adadelta");
  ASSERT_EQ(run(config, 2).failures, "");
  for (const int world_size : {1, 3}) {
    config.run.name = "parts" + std::to_string(world_size);
    config.run.resume = "none";
    ASSERT_TRUE(run(config, 2, /*stop_after=*/5).result.was_stopped);
    config.run.resume = "auto";
    ASSERT_EQ(run(config, world_size).failures, "");
    expect_near(losses(config.run.name), losses("whole"));
  }
}

TEST_F(TrainerTest, EveryOptimizerGoesOnBitForBit) {
  for (const std::string kind : {"adam", "sgd", "adagrad", "rmsprop", "adadelta"}) {
    Config config = this->config(kind + "-whole");
    config.optimizer = default_optimizer(kind);
    config.optimizer.momentum = 0.5;
    config.optimizer.rate_decay = 0.01;
    ASSERT_EQ(run(config, 2).failures, "");
    config.run.name = kind + "-parts";
    ASSERT_TRUE(run(config, 2, /*stop_after=*/7).result.was_stopped);
    config.run.resume = "auto";
    ASSERT_EQ(run(config, 2).failures, "");
    expect_same_bits(kind + "-whole", kind + "-parts", 12);
  }
}

// Earlier versions stored `step` as float32, and did not store it for RMSprop and Adadelta.
void set_states_of_earlier_versions(const std::string& snapshot) {
  const std::string path = snapshot + "/optimizer.safetensors";
  std::vector<NamedTensor> states = SafetensorsFile::open(path).read_all();
  const auto is_step = [](const NamedTensor& state) { return state.name.ends_with(".step"); };
  const bool has_unused_steps = std::ranges::any_of(
      states, [](const NamedTensor& state) { return state.name.ends_with(".square_avg"); });
  if (has_unused_steps) {
    std::erase_if(states, is_step);
  } else {
    for (NamedTensor& state : states) {
      if (is_step(state)) state.tensor = state.tensor.to(torch::kFloat);
    }
  }
  std::filesystem::remove(path);
  write_safetensors(path, states).value_or_throw();
}

TEST_F(TrainerTest, StatesOfEarlierVersionsGoOnBitForBit) {
  for (const std::string kind : {"adamw", "sgd", "rmsprop", "adadelta"}) {
    SCOPED_TRACE(kind);
    Config config = this->config(kind + "-whole");
    config.optimizer = default_optimizer(kind);
    ASSERT_EQ(run(config).failures, "");
    config.run.name = kind + "-parts";
    ASSERT_TRUE(run(config, 1, /*stop_after=*/7).result.was_stopped);
    set_states_of_earlier_versions(snapshot(config.run.name, 7));
    set_format(snapshot(config.run.name, 7), 2);
    config.run.resume = "auto";
    ASSERT_EQ(run(config).failures, "");
    expect_same_bits(kind + "-whole", kind + "-parts", 12);
  }
}

TEST_F(TrainerTest, AnAccumulatedStepIsTheWholeStep) {
  Config config = this->config("whole");
  config.run.global_batch_size = 7;
  ASSERT_EQ(run(config, 1).failures, "");
  // Each of the 4 parts has 2 or 3 samples, so on 3 ranks some ranks have an empty part.
  for (const int world_size : {1, 2, 3}) {
    for (const int64_t accumulate : {2, 4}) {
      config.run.name = cadre::format("parts{}-{}", world_size, accumulate);
      config.run.accumulate = accumulate;
      ASSERT_EQ(run(config, world_size).failures, "");
      expect_near(losses(config.run.name), losses("whole"));
    }
  }
}

TEST_F(TrainerTest, TheBestSnapshotIsTheOneWithTheLowestLoss) {
  Config config = this->config("a");
  config.optimizer.learning_rate = 0.05;  // too large, so the loss rises again
  config.schedule.kind = "constant";
  config.run.steps = 60;
  config.run.evaluate_every = 4;
  config.run.keep_best = true;
  ASSERT_EQ(run(config, 2).failures, "");
  double lowest = 1e9;
  int64_t best_step = 0;
  for (const nlohmann::json& line : metrics("a")) {
    if (!line.contains("held_out_loss") || line["held_out_loss"] >= lowest) continue;
    lowest = line["held_out_loss"];
    best_step = line["step"];
  }
  const SnapshotFolder snapshots(folder_ + "/a");
  EXPECT_EQ(snapshots.best(), snapshots.path_of(best_step));

  // The snapshot records the best loss, so a resumed run does not mark a snapshot with a higher
  // loss as the best.
  config.run.resume = "auto";
  config.run.steps = 61;
  config.optimizer.learning_rate = 10;
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_EQ(snapshots.best(), snapshots.path_of(best_step));
  config.run.resume = "best";
  const Run resumed = run(config);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, HasSubstr("resuming from " + *snapshots.best()));
}

TEST_F(TrainerTest, ALossThatIsNotFiniteIsNeverTheBest) {
  Config config = this->config("a");
  config.optimizer.learning_rate = 1e30;
  config.schedule = {.kind = "constant", .warmup_steps = 0};
  config.run.evaluate_every = 1;
  config.run.keep_best = true;
  EXPECT_THAT(run(config).failures, HasSubstr("step 2: the loss is"));
  EXPECT_FALSE(std::isfinite(metrics("a").back()["held_out_loss"].is_number()
                                 ? metrics("a").back()["held_out_loss"].get<double>()
                                 : std::nan("")));
  EXPECT_EQ(SnapshotFolder(folder_ + "/a").best(), std::nullopt);
}

TEST_F(TrainerTest, ThreadsThatFetchAheadChangeNoBit) {
  Config config = this->config("a");
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.name = "b";
  config.data.threads = 2;
  ASSERT_TRUE(run(config, 2, /*stop_after=*/5).result.was_stopped);
  config.run.resume = "auto";
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_EQ(losses("b"), losses("a"));
  expect_same_bits("a", "b", 12);
}

TEST_F(TrainerTest, FirstValuesMayComeFromAFile) {
  Config config = this->config("a");
  ASSERT_EQ(run(config).failures, "");
  config.model.weights = folder_ + "/a/step-000012/model.safetensors";
  config.run.name = "b";
  ASSERT_EQ(run(config).failures, "");
  EXPECT_LT(losses("b").front(), losses("a").front());
  config.model.width = 32;
  EXPECT_THAT(run(config).failures, HasSubstr("but the model has"));
  config = this->config("b");
  config.run.resume = "best";
  EXPECT_THAT(run(config).failures, HasSubstr("no snapshot was marked as the best"));
}

TEST_F(TrainerTest, SnapshotsOfFormat1AreReadAndGoneOnFromBitForBit) {
  Config config = this->config("whole");
  config.schedule.kind = "constant";
  ASSERT_EQ(run(config, 2).failures, "");
  config.run.name = "a";
  ASSERT_TRUE(run(config, 2, /*stop_after=*/6).result.was_stopped);
  const std::string snapshot = folder_ + "/a/step-000006";
  const std::string path = snapshot + "/state.json";
  set_format(snapshot, 1);
  nlohmann::json state = nlohmann::json::parse(std::ifstream(path));
  state["text"] = {{"num_tokens", state["data"]["size"]},
                   {"fingerprint", state["data"]["fingerprint"]}};
  state.erase("data");
  std::ofstream(path) << state.dump();
  config.run.resume = "auto";
  const Run resumed = run(config, 2);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, HasSubstr(snapshot + " has format 1, which has no digests"));
  expect_same_bits("whole", "a", 12);
  EXPECT_EQ(losses("a"), losses("whole"));
  set_format(folder_ + "/a/step-000012", 4);
  EXPECT_THAT(run(config).failures, HasSubstr("it has format 4"));
}

TEST_F(TrainerTest, AClipNormOfZeroIsNoLimit) {
  const auto run_with = [this](const std::string& name, double clip_norm) {
    Config config = this->config(name);
    config.optimizer = {.kind = "sgd", .learning_rate = 0.1, .clip_norm = clip_norm};
    ASSERT_EQ(run(config).failures, "");
  };
  run_with("none", 0);
  run_with("wide", 1e9);
  run_with("narrow", 1e-3);
  expect_same_bits("none", "wide", 12);
  EXPECT_LT(losses("none").back(), losses("narrow").back() - 0.01)
      << "the width must limit how well the model fits";
}

TEST_F(TrainerTest, SgdAndTheMlpTrain) {
  Config config = this->config("mlp");
  config.model.kind = "mlp";
  config.optimizer.kind = "sgd";
  config.optimizer.learning_rate = 0.3;
  config.run.steps = 40;
  ASSERT_EQ(run(config, 2).failures, "");
  EXPECT_LT(losses("mlp").back(), losses("mlp").front() - 1);
}

TEST_F(TrainerTest, ALossThatIsNoNumberEndsTheRun) {
  Config config = this->config("a");
  config.optimizer = {.kind = "sgd", .learning_rate = 100, .clip_norm = 0};
  config.run.steps = 100;
  EXPECT_THAT(run(config).failures, HasSubstr("lower optimizer.learning_rate"));
}

}  // namespace
}  // namespace cadre::train
