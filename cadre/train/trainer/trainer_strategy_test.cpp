// Compares runs under each strategy with the same run of one process.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/torch/trainer_runs.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

class TrainerStrategyTest : public TrainerTest {
 protected:
  Config config_of(const std::string& strategy, const std::string& name) const {
    Config config = this->config(name);
    config.parallel.strategy = strategy;
    config.run.accumulate = 2;
    return config;
  }

  void expect_losses_of_one_process(const Config& config, int world_size) {
    SCOPED_TRACE(config.run.name);
    const Run run = this->run(config, world_size);
    ASSERT_EQ(run.failures, "");
    expect_near(losses(config.run.name), losses("alone"));
    EXPECT_NEAR(run.result.held_out.loss, held_out_alone_, 1e-5);
    EXPECT_THAT(run.screen, HasSubstr("a sample:\n"));
  }

  void train_alone() {
    const Run run = this->run(config_of("single", "alone"));
    ASSERT_EQ(run.failures, "");
    held_out_alone_ = run.result.held_out.loss;
  }

  // Expects losses that differ from those of the run "alone" only by rounding to bfloat16.
  void expect_within_bfloat16(const std::string& name) const {
    SCOPED_TRACE(name);
    const std::vector<double> expected = losses("alone");
    const std::vector<double> actual = losses(name);
    ASSERT_EQ(actual.size(), expected.size());
    double largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(actual[i] - expected[i]) / expected[i]);
    }
    EXPECT_GT(largest, 1e-6);  // they do differ, so the run has computed in bfloat16
    EXPECT_LT(largest, 1e-2);
  }

  double held_out_alone_ = 0;
};

TEST_F(TrainerStrategyTest, FsdpTrainsAsOneProcess) {
  train_alone();
  for (const int world_size : {1, 2, 3}) {
    for (const std::string reshard : {"after_forward", "after_backward", "after_reduction"}) {
      Config config = config_of("fsdp", "fsdp_" + reshard + std::to_string(world_size));
      config.parallel.reshard = reshard;
      expect_losses_of_one_process(config, world_size);
    }
  }
}

// One rank has three samples for four accumulated parts, so one part is empty; the other rank has
// four.
TEST_F(TrainerStrategyTest, ARankMayHaveFewerSamplesThanParts) {
  const auto parts = [this](const std::string& strategy, const std::string& name) {
    Config config = config_of(strategy, name);
    config.run.global_batch_size = 7;
    config.run.accumulate = 4;
    return config;
  };
  const Run alone = run(parts("single", "alone"));
  ASSERT_EQ(alone.failures, "");
  held_out_alone_ = alone.result.held_out.loss;
  for (const std::string form : {"gathered", "mapped"}) {
    Config config = parts("fsdp", form);
    config.parallel.form = form;
    expect_losses_of_one_process(config, 2);
  }
  expect_losses_of_one_process(parts("ddp", "ddp"), 2);
}

TEST_F(TrainerStrategyTest, ZeroTrainsAsOneProcess) {
  train_alone();
  for (const std::string strategy : {"zero1", "zero2"}) {
    for (const int world_size : {1, 3}) {
      expect_losses_of_one_process(config_of(strategy, strategy + std::to_string(world_size)),
                                   world_size);
    }
  }
}

TEST_F(TrainerStrategyTest, HsdpTrainsAsOneProcess) {
  train_alone();
  expect_losses_of_one_process(config_of("hsdp", "hsdp"), 4);
}

TEST_F(TrainerStrategyTest, SingleHasTheBitsOfOneReplica) {
  train_alone();
  ASSERT_EQ(run(config_of("ddp", "ddp")).failures, "");
  EXPECT_EQ(losses("alone"), losses("ddp"));
  expect_same_bits("alone", "ddp", 12);
}

// The order of additions on one host does not depend on the strategy, so the bits are equal.
// Gradients are not clipped here: the squares in their norm are summed in another order over shards
// than over whole gradients.
TEST_F(TrainerStrategyTest, UnclippedStrategiesOfOneHostHaveTheSameBits) {
  for (const std::string kind : {"gpt", "mlp", "cnn"}) {
    for (const int world_size : {2, 3}) {
      if (kind == "cnn" && world_size == 2) continue;  // this combination would make the test slow
      SCOPED_TRACE(kind + " on " + std::to_string(world_size));
      const auto train = [&](const std::string& strategy) {
        Config config = config_of(strategy.substr(0, strategy.find(' ')),
                                  kind + strategy + std::to_string(world_size));
        config.parallel.form = strategy == "fsdp mapped" ? "mapped" : "gathered";
        config.model.kind = kind;
        config.model.dropout = false;  // the ranks are threads, which share one random generator
        if (kind == "cnn") config.data = {.kind = "synthetic", .samples = 64};
        config.run.steps = 4;
        // The ranks' shares of the batch are uneven. Each has more than one sample: with one
        // sample, a product is a matrix-vector product, whose rounding depends on the alignment of
        // the matrix.
        config.run.global_batch_size = 14;
        config.optimizer.clip_norm = 0;
        EXPECT_EQ(run(config, world_size).failures, "");
        return config.run.name;
      };
      const std::string expected = train("ddp");
      ASSERT_EQ(losses(expected).size(), 4U);
      for (const std::string strategy : {"zero1", "zero2", "fsdp", "fsdp mapped"}) {
        const std::string actual = train(strategy);
        EXPECT_EQ(losses(actual), losses(expected)) << strategy;
        expect_same_bits(expected, actual, 4);
      }
    }
  }
}

TEST_F(TrainerStrategyTest, RefusesNumbersOfProcessesThatDoNotSuit) {
  EXPECT_THAT(run(config_of("hsdp", "hsdp"), 3).failures,
              HasSubstr("parallel.replicas is 2, which does not divide the 3 processes"));
  EXPECT_THAT(run(config_of("single", "single"), 2).failures,
              HasSubstr("parallel.strategy is single, which takes one process, but there "
                        "are 2 processes: choose ddp, zero1, zero2, fsdp or hsdp, or start one "
                        "process"));
}

TEST_F(TrainerStrategyTest, AutocastLearnsAsFloat32DoesWithinItsRoundingUnderEveryStrategy) {
  train_alone();
  for (const auto& [strategy, world_size] : std::vector<std::pair<std::string, int>>{
           {"single", 1}, {"ddp", 2}, {"zero1", 2}, {"zero2", 2}, {"fsdp", 2}}) {
    Config config = config_of(strategy, "autocast_" + strategy);
    config.run.autocast = "bfloat16";
    ASSERT_EQ(run(config, world_size).failures, "");
    expect_within_bfloat16(config.run.name);
  }
}

TEST_F(TrainerStrategyTest, Bfloat16ParametersLearnAsFloat32OnesDoWithinTheirRounding) {
  train_alone();
  Config config = config_of("fsdp", "bfloat16");
  config.parallel.parameter_dtype = "bfloat16";
  ASSERT_EQ(run(config, 2).failures, "");
  expect_within_bfloat16("bfloat16");
}

// The run also evaluates between two steps, and is stopped and resumed.
TEST_F(TrainerStrategyTest, FormsAndOffloadGiveTheSameBits) {
  const auto train = [this](const std::string& strategy, const std::string& form,
                            const std::string& offload, int world_size) {
    Config config = config_of(strategy, strategy + form + (offload == "none" ? "" : "files"));
    config.parallel.form = form;
    config.parallel.offload = offload;
    config.run.evaluate_every = 3;
    EXPECT_TRUE(run(config, world_size, /*stop_after=*/5).result.was_stopped);
    config.run.resume = "auto";
    EXPECT_EQ(run(config, world_size).failures, "");
    return config.run.name;
  };
  for (const auto& [strategy, world_size] :
       std::vector<std::pair<std::string, int>>{{"fsdp", 3}, {"hsdp", 4}}) {
    SCOPED_TRACE(strategy);
    const std::string expected = train(strategy, "gathered", "none", world_size);
    ASSERT_EQ(losses(expected).size(), 12U);
    const std::string in_files = train(strategy, "gathered", folder_, world_size);
    EXPECT_EQ(losses(in_files), losses(expected));
    expect_same_bits(expected, in_files, 12);
    const std::string mapped = train(strategy, "mapped", "none", world_size);
    // The gradient norm is summed over other slices than with the expected run, so the last bits
    // differ.
    expect_near(losses(mapped), losses(expected));
  }
}

TEST_F(TrainerStrategyTest, AFolderForOffloadThatIsNotThereIsNamed) {
  Config config = config_of("fsdp", "a");
  config.parallel.offload = folder_ + "/nothing";
  EXPECT_THAT(run(config, 2).failures,
              HasSubstr("parallel.offload: there is no folder " + folder_ + "/nothing; make it"));
}

// The recomputed forward must get the arguments and the random numbers of the first forward.
TEST_F(TrainerStrategyTest, RecomputedActivationsGiveTheSameBits) {
  const std::vector<std::pair<std::string, int>> ways = {
      {"single", 1}, {"ddp", 2}, {"zero2", 2}, {"fsdp", 2}};
  for (const std::string kind : {"gpt", "mlp", "image_mlp", "cnn"}) {
    for (const auto& [strategy, world_size] : ways) {
      if (kind == "cnn" && strategy == "zero2")
        // This combination would make the test slow.
        continue;
      const auto train = [&, &strategy = strategy,
                          &world_size = world_size](const std::string& recomputed) {
        Config config = config_of(strategy, kind + strategy + recomputed);
        config.model.kind = kind == "image_mlp" ? "mlp" : kind;
        config.model.layers = 2;
        config.model.checkpoint_activations = recomputed;
        // The ranks are threads, which share one random generator.
        config.model.dropout = world_size == 1;
        if (kind == "cnn" || kind == "image_mlp")
          config.data = {.kind = "synthetic", .samples = 64};
        config.run.steps = 3;
        at::manual_seed(11);
        EXPECT_EQ(run(config, world_size).failures, "");
        return config.run.name;
      };
      SCOPED_TRACE(kind + " under " + strategy);
      const std::string expected = train("none");
      const std::string actual = train("blocks");
      ASSERT_EQ(losses(expected).size(), 3U);
      EXPECT_EQ(losses(actual), losses(expected));
      expect_same_bits(expected, actual, 3);
    }
  }
}

}  // namespace
}  // namespace cadre::train
