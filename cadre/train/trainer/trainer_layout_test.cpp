// Compares runs whose model is divided among processes with the same run in one process, with
// dropout, and with tied and untied heads. The two round differently in float32: after 20 steps of
// AdamW their losses differ by less than 2e-5, as with data parallelism, while a defect of the
// gradients makes a difference a hundred times as large (cadre verify compares in float64). The
// seed CADRE_CASES_SEED chooses which of the layouts CTest runs.
#include <gmock/gmock.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/config/config_fields.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

struct TrainedLayout {
  std::string name;
  int num_processes = 1;
  ParallelConfig parallel = {};
  bool is_tied = true;
  bool has_experts = false;
};

std::ostream& operator<<(std::ostream& out, const TrainedLayout& layout) {
  return out << layout.name;
}

const TrainedLayout kAlone{.name = "single", .parallel = {.strategy = "single"}};

std::vector<TrainedLayout> trained_layouts() {
  return {
      {"ddp", 3, {}, false},
      {"tensor", 2, {.strategy = "single", .tensor = 2}},
      {"tensor_4_sequence", 4, {.tensor = 4, .sequence = true}, false},
      {"ddp_tensor", 4, {.tensor = 2}},
      {"ddp_tensor_sequence", 4, {.tensor = 2, .sequence = true}, false},
      {"zero1_tensor", 4, {.strategy = "zero1", .tensor = 2}, false},
      {"zero2_tensor", 4, {.strategy = "zero2", .tensor = 2}},
      {"fsdp_tensor", 4, {.strategy = "fsdp", .tensor = 2}},
      {"fsdp_gathered_tensor", 4, {.strategy = "fsdp", .form = "gathered", .tensor = 2}, false},
      {"hsdp_tensor", 8, {.strategy = "hsdp", .replicas = 2, .tensor = 2}},
      {"pipeline", 2, {.pipeline = 2}},
      {"pipeline_4", 4, {.strategy = "single", .pipeline = 4, .microbatches = 4}, false},
      {"pipeline_interleaved",
       2,
       {.pipeline = 2, .schedule = "interleaved-1f1b", .virtual_stages = 2}},
      {"pipeline_zb_v", 2, {.pipeline = 2, .schedule = "zb-v", .virtual_stages = 2}},
      {"ddp_pipeline", 4, {.pipeline = 2}, false},
      {"fsdp_pipeline", 4, {.strategy = "fsdp", .pipeline = 2}},
      {"hsdp_pipeline", 8, {.strategy = "hsdp", .replicas = 2, .pipeline = 2}},
      {"pipeline_tensor", 4, {.tensor = 2, .pipeline = 2, .schedule = "zb-h1"}},
      {"pipeline_tensor_sequence", 4, {.tensor = 2, .sequence = true, .pipeline = 2}, false},
      {"ddp_pipeline_tensor", 8, {.tensor = 2, .pipeline = 2, .microbatches = 2}},
      {"fsdp_pipeline_tensor", 8, {.strategy = "fsdp", .tensor = 2, .pipeline = 2}},
      {"context", 2, {.context = 2}, false},
      {"context_all_to_all", 2, {.context = 2, .attention = "all_to_all"}},
      {"ddp_context", 4, {.context = 2}},
      {"zero1_context", 4, {.strategy = "zero1", .context = 2}},
      {"zero2_context", 4, {.strategy = "zero2", .context = 2}},
      {"fsdp_context", 4, {.strategy = "fsdp", .context = 2}, false},
      {"context_tensor_sequence", 4, {.tensor = 2, .sequence = true, .context = 2}},
      {"pipeline_context", 4, {.pipeline = 2, .context = 2}},
      {"pipeline_context_tensor", 8, {.tensor = 2, .pipeline = 2, .context = 2}, false},
      {"ddp_of_experts", 3, {}, true, true},
      {"fsdp_of_experts", 2, {.strategy = "fsdp"}, true, true},
      {"expert", 2, {.expert = 2}, false, true},
      {"expert_4", 4, {.strategy = "single", .expert = 4}, true, true},
      {"ddp_expert", 4, {.expert = 2}, true, true},
      {"ddp_3_expert", 6, {.expert = 2}, true, true},
      {"zero1_expert", 4, {.strategy = "zero1", .expert = 2}, true, true},
      {"zero2_expert", 4, {.strategy = "zero2", .expert = 2}, false, true},
      {"fsdp_expert", 4, {.strategy = "fsdp", .expert = 2}, true, true},
      {"fsdp_gathered_expert",
       4,
       {.strategy = "fsdp", .form = "gathered", .expert = 2},
       true,
       true},
      {"hsdp_expert", 8, {.strategy = "hsdp", .replicas = 2, .expert = 2}, true, true},
      {"ddp_expert_tensor", 8, {.tensor = 2, .expert = 2}, true, true},
      {"zero2_expert_context", 8, {.strategy = "zero2", .context = 2, .expert = 2}, true, true},
  };
}

const TrainedLayout& layout_named(const std::string& name) {
  static const std::vector<TrainedLayout> layouts = trained_layouts();
  return *std::ranges::find(layouts, name, &TrainedLayout::name);
}

class TrainerLayoutTest : public TrainerTest {
 protected:
  Config config_of(const TrainedLayout& layout, const std::string& name) const {
    Config config = this->config(name);
    config.model = {.layers = 4,
                    .heads = 4,
                    .width = 16,
                    .context = 16,
                    .dropout_rate = 0.1,
                    .tied = layout.is_tied,
                    .experts = layout.has_experts ? 4 : 0,
                    .auxiliary_loss = 0.1};
    config.run.steps = 20;
    config.run.global_batch_size = 8;
    config.parallel = layout.parallel;
    return config;
  }
  Config config_of(const TrainedLayout& layout) const { return config_of(layout, layout.name); }

  // Trains the layout's model in one process, once with tied and once with an untied head, and
  // returns the name of that run.
  std::string alone(const TrainedLayout& model) {
    const std::string name = std::string(model.is_tied ? "alone_tied" : "alone_untied") +
                             (model.has_experts ? "_experts" : "");
    if (!metrics(name).empty()) return name;
    TrainedLayout layout = kAlone;
    layout.is_tied = model.is_tied;
    layout.has_experts = model.has_experts;
    EXPECT_EQ(run(config_of(layout, name)).failures, "");
    return name;
  }

  std::vector<double> numbers(const std::string& run_name, const std::string& key) const {
    std::vector<double> numbers;
    for (const nlohmann::json& line : metrics(run_name)) {
      if (line.contains(key)) numbers.push_back(line[key]);
    }
    return numbers;
  }

  static double worst(const std::vector<double>& actual, const std::vector<double>& expected) {
    EXPECT_EQ(actual.size(), expected.size());
    double largest = 0;
    for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
      largest = std::max(largest, std::abs(actual[i] - expected[i]));
    }
    return largest;
  }

  // Compares the run `name` with the run of the same `model` in one process.
  void expect_run_of_one_process(const std::string& name, const TrainedLayout& model) {
    const std::string expected = alone(model);
    ASSERT_EQ(losses(name).size(), 20U);
    EXPECT_LE(worst(losses(name), losses(expected)), 2e-5);
    EXPECT_LE(worst(numbers(name, "gradient_norm"), numbers(expected, "gradient_norm")), 1e-4);
    ASSERT_EQ(numbers(name, "held_out_loss").size(), 1U);
    EXPECT_LE(worst(numbers(name, "held_out_loss"), numbers(expected, "held_out_loss")), 2e-5);
  }

  void expect_parameters_of_one_process(const std::string& name, const TrainedLayout& model) {
    const std::vector<NamedTensor> actual = tensors(name, 20, "model.safetensors");
    const std::vector<NamedTensor> expected = tensors(alone(model), 20, "model.safetensors");
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i].name, expected[i].name);
      ASSERT_EQ(actual[i].tensor.sizes(), expected[i].tensor.sizes()) << expected[i].name;
      // If the gradient of an element is close to zero, rounding decides its sign. In the first
      // steps of AdamW, the sign moves the element by up to the learning rate; therefore only the
      // mean is compared.
      const double mean = (actual[i].tensor - expected[i].tensor).abs().mean().item<double>();
      EXPECT_LE(mean, 2e-5) << expected[i].name;
    }
  }

  // Trains two steps under each layout in turn, resuming from a snapshot, and the remaining steps
  // under the last one.
  void expect_chain(const std::vector<std::string>& order, const TrainedLayout& model) {
    int64_t step = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      SCOPED_TRACE(order[i]);
      TrainedLayout layout = order[i] == "single" ? kAlone : layout_named(order[i]);
      layout.is_tied = model.is_tied;
      layout.has_experts = model.has_experts;
      Config config = config_of(layout, "chain");
      config.run.resume = "auto";
      const bool is_last = i + 1 == order.size();
      const Run part = run(config, layout.num_processes, is_last ? -1 : 2);
      ASSERT_EQ(part.failures, "");
      step += 2;
      if (!is_last) ASSERT_EQ(part.result.steps, step);
    }
    expect_run_of_one_process("chain", model);
    expect_parameters_of_one_process("chain", model);
  }
};

class TrainerLayouts : public TrainerLayoutTest,
                       public ::testing::WithParamInterface<TrainedLayout> {};

TEST_P(TrainerLayouts, TrainAsOneProcess) {
  const TrainedLayout& layout = GetParam();
  const Run run = this->run(config_of(layout), layout.num_processes);
  ASSERT_EQ(run.failures, "");
  expect_run_of_one_process(layout.name, layout);
  expect_parameters_of_one_process(layout.name, layout);
  EXPECT_THAT(run.screen, HasSubstr("a sample:\n"));
  EXPECT_GT(numbers(layout.name, "communication_share").back(), 0);
}

INSTANTIATE_TEST_SUITE_P(Equality, TrainerLayouts,
                         ::testing::ValuesIn(testing::share_of(trained_layouts())),
                         ::testing::PrintToStringParamName());

// A snapshot that was saved under each layout is resumed under the next one. The test also fails if
// the dropout position, the states of AdamW or its step counts are wrong.
TEST_F(TrainerLayoutTest, ASnapshotOfEachLayoutResumesUnderTheNext) {
  expect_chain({"ddp_tensor", "single", "fsdp_pipeline", "zero2_tensor", "pipeline_zb_v",
                "context_tensor_sequence", "fsdp_tensor", "pipeline_tensor", "zero1_tensor",
                "pipeline_interleaved"},
               kAlone);
}

TEST_F(TrainerLayoutTest, ASnapshotOfExpertsResumesUnderTheNextLayout) {
  TrainedLayout model = kAlone;
  model.has_experts = true;
  expect_chain({"ddp_expert", "single", "expert_4", "fsdp_expert", "single", "zero2_expert",
                "fsdp_of_experts", "ddp_expert_tensor", "zero1_expert"},
               model);
}

TEST_F(TrainerLayoutTest, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  for (const std::string name : {"ddp_tensor_sequence", "ddp_pipeline_tensor"}) {
    SCOPED_TRACE(name);
    const TrainedLayout& layout = layout_named(name);
    ASSERT_EQ(run(config_of(layout, name), layout.num_processes).failures, "");
    Config config = config_of(layout, name + "_stopped");
    config.run.snapshot_every = 4;
    EXPECT_TRUE(run(config, layout.num_processes, 7).result.was_stopped);
    config.run.resume = "auto";
    ASSERT_EQ(run(config, layout.num_processes).failures, "");
    EXPECT_EQ(losses(name + "_stopped"), losses(name));
    expect_same_bits(name, name + "_stopped", 20);
  }
}

// The size of the vocabulary is odd, so the flat buffers of the processes of parallel.tensor have
// different sizes. All these processes have the position embeddings, but their shards of it end at
// different elements.
TEST_F(TrainerLayoutTest, ShardsOfUnevenPartsAreSavedAndResumed) {
  const auto long_context = [this](TrainedLayout layout, const std::string& name) {
    layout.is_tied = true;
    Config config = config_of(layout, name);
    config.model.context = 160;
    config.run.steps = 2;
    return config;
  };
  ASSERT_EQ(run(long_context(kAlone, "alone")).failures, "");
  const std::vector<NamedTensor> expected = tensors("alone", 2, "model.safetensors");
  for (const std::string name :
       {"zero1_tensor", "zero2_tensor", "fsdp_tensor", "fsdp_gathered_tensor"}) {
    SCOPED_TRACE(name);
    const TrainedLayout& layout = layout_named(name);
    Config config = long_context(layout, name);
    ASSERT_EQ(run(config, layout.num_processes).failures, "");
    const std::vector<NamedTensor> actual = tensors(name, 2, "model.safetensors");
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i].name, expected[i].name);
      const double mean = (actual[i].tensor - expected[i].tensor).abs().mean().item<double>();
      EXPECT_LE(mean, 2e-5) << expected[i].name;
    }
    config = long_context(kAlone, name);
    config.run.resume = "auto";
    config.run.steps = 3;
    const Run resumed = run(config);
    EXPECT_EQ(resumed.failures, "");
    EXPECT_EQ(resumed.result.steps, 3);
  }
}

TEST_F(TrainerLayoutTest, EveryStrategyOfEveryDivisionStarts) {
  int num_started = 0;
  for (const ParallelConfig& division :
       {ParallelConfig{.tensor = 2}, {.pipeline = 2}, {.context = 2}, {.expert = 2}}) {
    for (const char* strategy : {"single", "ddp", "zero1", "zero2", "fsdp", "hsdp"}) {
      TrainedLayout layout{.parallel = division, .has_experts = division.expert > 1};
      layout.parallel.strategy = strategy;
      layout.parallel.replicas = 1;
      layout.name = layout_name(layout.parallel);
      SCOPED_TRACE(layout.name);
      Config config = config_of(layout);
      config.run.steps = 2;
      config.run.evaluate_tokens = 100;
      config.sample.tokens = 0;
      if (find_layout_conflict(config)) continue;
      EXPECT_EQ(run(config, 2).failures, "");
      ++num_started;
    }
  }
  EXPECT_EQ(num_started, 22);  // 22 and not 24: a pipeline supports neither zero1 nor zero2
}

// Processes have different numbers of samples, and some microbatches are empty on some processes.
TEST_F(TrainerLayoutTest, SharesAndPartsMayBeUneven) {
  const auto uneven = [this](const TrainedLayout& layout) {
    Config config = config_of(layout);
    config.run.global_batch_size = 5;
    config.run.accumulate = 5;
    config.run.steps = 6;
    return config;
  };
  ASSERT_EQ(run(uneven(kAlone)).failures, "");
  for (const std::string name : {"ddp_tensor", "fsdp_tensor", "ddp_context"}) {
    TrainedLayout layout = layout_named(name);
    layout.is_tied = true;
    ASSERT_EQ(run(uneven(layout), layout.num_processes).failures, "");
    EXPECT_LE(worst(losses(name), losses("single")), 2e-5) << name;
  }
}

// The loss of a step is the mean over the losses of its accumulated parts if there is no auxiliary
// loss. The parts have different sizes, and some are empty on some or all processes.
TEST_F(TrainerLayoutTest, PartsOfExpertsAddUpToTheStep) {
  const auto in_parts = [this](TrainedLayout layout, int64_t batch, int64_t num_parts) {
    layout.is_tied = layout.has_experts = true;
    Config config = config_of(layout, cadre::format("{}_{}_{}", layout.name, batch, num_parts));
    config.model.auxiliary_loss = 0;
    config.run.global_batch_size = batch;
    config.run.accumulate = num_parts;
    config.run.steps = 4;
    EXPECT_EQ(run(config, layout.num_processes).failures, "");
    return losses(config.run.name);
  };
  EXPECT_LE(worst(in_parts(kAlone, 4, 2), in_parts(kAlone, 4, 1)), 2e-5);
  EXPECT_LE(worst(in_parts(layout_named("ddp_of_experts"), 4, 2), losses("single_4_1")), 2e-5);
  EXPECT_LE(worst(in_parts(layout_named("expert"), 6, 6), in_parts(kAlone, 6, 1)), 2e-5);
  EXPECT_LE(worst(in_parts(layout_named("fsdp_of_experts"), 6, 2), losses("single_6_1")), 2e-5);
}

// An untrained router chooses experts almost evenly, so the load-balancing loss of each of the four
// blocks is about 1. The training loss includes it; the held-out loss does not.
TEST_F(TrainerLayoutTest, TheLossHasTheAuxiliaryLossOfAllBlocks) {
  const auto weighted = [this](TrainedLayout layout, double weight) {
    layout.is_tied = layout.has_experts = true;
    Config config = config_of(layout, layout.name + (weight > 0 ? "_weighted" : "_plain"));
    config.model.auxiliary_loss = weight;
    config.run.steps = 2;
    return config;
  };
  for (const TrainedLayout& layout : {kAlone, layout_named("ddp_expert")}) {
    SCOPED_TRACE(layout.name);
    ASSERT_EQ(run(weighted(layout, 0.5), layout.num_processes).failures, "");
    ASSERT_EQ(run(weighted(layout, 0), layout.num_processes).failures, "");
    const auto difference = [&](const std::string& key) {
      return numbers(layout.name + "_weighted", key).at(0) -
             numbers(layout.name + "_plain", key).at(0);
    };
    EXPECT_NEAR(difference("loss"), 0.5 * 4, 0.1);
    EXPECT_NEAR(difference("held_out_loss"), 0, 0.1);
  }
}

// A capacity must drop the same tokens as in one process, even if processes have different numbers
// of samples.
TEST_F(TrainerLayoutTest, ACapacityOfExpertsIsThatOfAllTokens) {
  const auto limited = [this](TrainedLayout layout, double capacity_factor) {
    layout.is_tied = layout.has_experts = true;
    Config config = config_of(layout, layout.name + std::to_string(capacity_factor > 0));
    config.model.capacity_factor = capacity_factor;
    config.run.steps = 6;
    return config;
  };
  ASSERT_EQ(run(limited(kAlone, 0)).failures, "");
  ASSERT_EQ(run(limited(kAlone, 0.5)).failures, "");
  EXPECT_GT(worst(losses("single1"), losses("single0")), 1e-4);
  for (const std::string name : {"ddp_of_experts", "ddp_expert", "fsdp_expert"}) {
    const TrainedLayout& layout = layout_named(name);
    ASSERT_EQ(run(limited(layout, 0.5), layout.num_processes).failures, "");
    EXPECT_LE(worst(losses(name + "1"), losses("single1")), 2e-5) << name;
    EXPECT_LE(worst(numbers(name + "1", "held_out_loss"), numbers("single1", "held_out_loss")),
              2e-5)
        << name;
  }
}

// Recomputing the activations also repeats the collectives and the dropout of the forward; the
// result must have the same bits.
TEST_F(TrainerLayoutTest, RecomputedActivationsGiveTheSameBits) {
  for (const std::string name :
       {"ddp_tensor_sequence", "pipeline_tensor", "fsdp_context", "fsdp_expert"}) {
    const TrainedLayout& layout = layout_named(name);
    for (const std::string recomputed : {"none", "blocks"}) {
      Config config = config_of(layout, name + recomputed);
      config.run.steps = 3;
      config.model.checkpoint_activations = recomputed;
      ASSERT_EQ(run(config, layout.num_processes).failures, "");
    }
    ASSERT_EQ(losses(name + "none").size(), 3U);
    EXPECT_EQ(losses(name + "blocks"), losses(name + "none")) << name;
    expect_same_bits(name + "blocks", name + "none", 3);
  }
}

TEST_F(TrainerLayoutTest, WeightsOfAPlainModelAreDivided) {
  TrainedLayout first = kAlone;
  Config config = config_of(first, "weights");
  config.run.steps = 2;
  ASSERT_EQ(run(config).failures, "");
  for (const TrainedLayout& layout :
       {kAlone, layout_named("fsdp_tensor"), layout_named("pipeline_tensor")}) {
    Config further = config_of(layout, layout.name + "_further");
    further.model.weights = snapshot("weights", 2);
    further.run.steps = 3;
    ASSERT_EQ(run(further, layout.num_processes).failures, "");
    EXPECT_LE(worst(losses(layout.name + "_further"), losses("single_further")), 2e-5)
        << layout.name;
  }
}

// Every process must throw exactly this sentence.
TEST_F(TrainerLayoutTest, ASnapshotOfAnotherModelIsRefused) {
  Config first = config_of(kAlone, "a");
  first.run.steps = 2;
  ASSERT_EQ(run(first).failures, "");
  const auto expect_refusal = [this](const std::string& layout, auto change,
                                     const std::string& sentence) {
    TrainedLayout divided = layout_named(layout);
    divided.is_tied = true;
    Config config = config_of(divided, "a");
    config.run.resume = "auto";
    change(config.model);
    std::string expected;
    for (int rank = 0; rank < divided.num_processes; ++rank) {
      expected += cadre::format("rank {}: kInvalidArgument: {}\n", rank, sentence);
    }
    EXPECT_EQ(run(config, divided.num_processes).failures, expected);
  };
  const std::string unchanged = "restore it, or start at step 0 with run.resume=none";
  expect_refusal(
      "tensor", [](ModelConfig& model) { model.heads = 2; },
      "model.heads was 4 when the snapshot was written and is 2 now: the same parameters with "
      "another number of heads are another model; " +
          unchanged);
  expect_refusal(
      "pipeline", [](ModelConfig& model) { model.tied = false; },
      "model.tied was true when the snapshot was written and is false now: the saved parameters "
      "are those of another model; " +
          unchanged);
  const std::string file = "rank 0: " + snapshot("a", 2) + "/model.safetensors has ";
  const std::string remedy =
      "; restore [model] and [optimizer] as they were when the snapshot was written, or start at "
      "step 0 with run.resume=none";
  expect_refusal(
      "tensor", [](ModelConfig& model) { model.width = 32; },
      file + "tensor 'wte.weight' as F32 (257, 16), but the model has F32 (257, 32)" + remedy);
  expect_refusal(
      "pipeline", [](ModelConfig& model) { model.layers = 6; },
      file + "no tensor 'h_4.attn_c_attn.bias', which the model needs (24 are missing)" + remedy);
  expect_refusal(
      "pipeline_tensor", [](ModelConfig& model) { model.layers = 2; },
      file + "a tensor 'h_2.attn_c_attn.bias', which the model does not (24 of 52 are unexpected)" +
          remedy);
}

TEST_F(TrainerLayoutTest, ALayoutThatDoesNotFitEndsTheRunBeforeTheModelIsConstructed) {
  Config config = config_of(layout_named("ddp_tensor"));
  const Run run = this->run(config, 3);
  EXPECT_THAT(run.failures,
              HasSubstr("tensor 2 takes 2 processes, and the 3 processes of this job are not a "
                        "multiple of that: start a multiple of 2 processes, or change "
                        "parallel.tensor, pipeline, context or expert"));
}

}  // namespace
}  // namespace cadre::train
