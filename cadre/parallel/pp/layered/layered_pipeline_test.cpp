// Tests that a pipeline made from the layers of a whole model has the losses and gradients of the
// model in one process, also for parameters that its stages share. Ranks are threads.
#include "cadre/parallel/pp/layered/layered_pipeline.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/layers/transformer/transformer.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::layered_pipeline_test {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr TransformerOptions kOptions{
    .vocabulary = 7, .context = 4, .embed_dim = 8, .num_heads = 2, .num_blocks = 4};
constexpr int kNumMicrobatches = 4;

// Returns a GPT of six layers. The head uses the weight of the embedding (a tied head).
torch::nn::Sequential make_gpt() {
  torch::manual_seed(1);
  const TransformerEmbedding embedding(kOptions);
  torch::nn::Sequential gpt(embedding);
  for (int i = 0; i < kOptions.num_blocks; ++i) gpt->push_back(TransformerBlock(kOptions));
  gpt->push_back(TransformerHead(embedding));
  gpt->to(torch::kDouble);
  return gpt;
}

// Constructs the models of all ranks one after the other, because the ranks are threads and draw
// from the same random generator.
std::vector<torch::nn::Sequential> make_gpts(int num_ranks) {
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < num_ranks; ++rank) models.push_back(make_gpt());
  return models;
}

// Takes a rank's model out of the list, because it must be destroyed before the os::System of its
// group.
torch::nn::Sequential taken(std::vector<torch::nn::Sequential>& models, const ProcessGroup& group) {
  return std::exchange(models[static_cast<size_t>(group.rank())], nullptr);
}

Tensor tokens_of(int64_t first) {
  return (torch::arange(32).view({8, 4}) * 5 + first).remainder(kOptions.vocabulary);
}

Tensor loss_of(const Tensor& logits, const Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

struct LayeredCase {
  std::string schedule;
  std::vector<int64_t> layers_per_stage;
  // The number of parameters on each rank. The tied table counts once on each rank that has it.
  std::vector<size_t> num_parameters;
};

// A block has 12 parameters, the embedding 2 (the table and the positions), and the head 2, plus
// the table if the embedding is on another rank.
std::vector<LayeredCase> layered_cases() {
  return {{"1f1b", {}, {2 + 24, 24 + 3}},
          {"1f1b", {1, 5}, {2, 48 + 3}},
          {"gpipe", {5, 1}, {2 + 48, 3}},
          // Rank 0 has the first stage and the last one in zb-v, so its table counts once.
          {"zb-v", {2, 1, 1, 2}, {2 + 12 + 12 + 2, 24}},
          {"interleaved-1f1b", {}, {2 + 12 + 12, 24 + 3}}};
}

TEST(LayeredPipeline, HasTheLossAndTheGradientsOfOneProcess) {
  const Tensor tokens = tokens_of(0);
  const Tensor targets = tokens_of(1);
  torch::nn::Sequential plain = make_gpt();
  const Tensor expected = loss_of(plain->forward(tokens), targets);
  expected.backward();
  const auto parameters = plain->named_parameters();
  for (const LayeredCase& layered : layered_cases()) {
    auto models = make_gpts(2);
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      torch::nn::Sequential gpt = taken(models, group);
      Pipeline pipeline = pipeline_of(
          *gpt, group, {.schedule = layered.schedule, .num_microbatches = kNumMicrobatches},
          {.layers_per_stage = layered.layers_per_stage});
      const size_t num_parameters = pipeline.parameters().size();
      require(num_parameters == layered.num_parameters[static_cast<size_t>(group.rank())],
              "parameters: " + std::to_string(num_parameters));
      // The gradients of two steps add up, as in one process.
      for (int step = 0; step < 2; ++step) {
        const auto output = pipeline.step(tokens, targets, loss_of, {.broadcast_losses = true});
        require(torch::allclose(output.loss, expected, 1e-12, 1e-14), "the loss");
      }
      size_t num_held = 0;
      const auto records = pipeline.parameter_shards();
      require(records.size() == parameters.size(), "records: " + std::to_string(records.size()));
      for (const ParameterShard& record : records) {
        if (record.range.size() == 0) continue;
        ++num_held;
        require(
            torch::allclose(record.values.grad(), parameters[record.name].grad() * 2, 1e-10, 1e-13),
            record.name);
      }
      require(num_held == num_parameters, "held: " + std::to_string(num_held));
    });
    EXPECT_TRUE(result.ok()) << layered.schedule << "\n" << result.failures();
  }
}

TEST(LayeredPipeline, OneRankHasTheWholeModelAsOneStage) {
  auto models = make_gpts(1);
  const auto result = run_groups(1, [&](const ProcessGroup& group) {
    torch::nn::Sequential gpt = taken(models, group);
    Pipeline pipeline = pipeline_of(*gpt, group, {.num_microbatches = 2});
    const Tensor tokens = tokens_of(0);
    const Tensor logits = pipeline.forward(tokens).outputs[0];
    require(torch::allclose(logits, gpt->forward(tokens), 1e-12, 1e-14), "the logits");
    require(pipeline.parameters().size() == gpt->parameters().size(), "each parameter once");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A weight that two layers of the program have registered is tied, as the weight of a SharingModule
// is.
TEST(LayeredPipeline, ATensorThatLayersOfTwoStagesRegisterIsTied) {
  auto make_model = [] {
    torch::nn::Linear layer(torch::nn::LinearOptions(3, 3).bias(false));
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(torch::arange(9).view({3, 3}).sin());
    return torch::nn::Sequential(layer, torch::nn::Tanh(), layer);
  };
  const auto square = [](const Tensor& output, const Tensor& target) {
    return torch::mse_loss(output, target);
  };
  const Tensor x = torch::arange(12).view({4, 3}).cos();
  torch::nn::Sequential plain = make_model();
  square(plain->forward(x), x).backward();
  const Tensor expected = plain->parameters()[0].grad();
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    torch::nn::Sequential model = make_model();
    Pipeline pipeline = pipeline_of(*model, group);
    pipeline.step(x, x, square);
    require(pipeline.parameters().size() == 1, "one weight");
    require(torch::allclose(pipeline.parameters()[0].grad(), expected, 1e-5, 1e-6), "its gradient");
    pipeline.check_tied_parameters();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Tests blocks with recompute in stages with recompute, under schedules that split the backward.
TEST(LayeredPipeline, BlocksOfStagesMayBothRecompute) {
  const Tensor tokens = tokens_of(0);
  const Tensor targets = tokens_of(1);
  torch::nn::Sequential plain = make_gpt();
  loss_of(plain->forward(tokens), targets).backward();
  const auto parameters = plain->named_parameters();
  for (const std::string schedule : {"1f1b", "zb-h1", "zb-v"}) {
    auto models = make_gpts(2);
    for (auto& model : models) {
      for (int i = 1; i <= kOptions.num_blocks; ++i) {
        model->ptr<TransformerBlockImpl>(static_cast<size_t>(i))->options.recompute = true;
      }
    }
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      torch::nn::Sequential gpt = taken(models, group);
      Pipeline pipeline =
          pipeline_of(*gpt, group, {.schedule = schedule, .num_microbatches = kNumMicrobatches},
                      {.recompute = true});
      pipeline.step(tokens, targets, loss_of);
      for (const ParameterShard& record : pipeline.parameter_shards()) {
        if (record.range.size() == 0) continue;
        require(torch::allclose(record.values.grad(), parameters[record.name].grad(), 1e-10, 1e-13),
                record.name);
      }
    });
    EXPECT_TRUE(result.ok()) << schedule << "\n" << result.failures();
  }
}

// Two tensors that share memory are one weight in the model, but would be two weights in the
// pipeline. So pipeline_of() must throw.
TEST(LayeredPipeline, TensorsOfTwoRanksThatShareMemoryAreRefused) {
  const auto make_model = [] {
    const torch::nn::Linear first(2, 2);
    const torch::nn::Linear last(2, 2);
    last->weight.set_data(first->weight.detach().t());
    return torch::nn::Sequential(first, last);
  };
  for (const bool is_deferred : {false, true}) {
    std::vector<torch::nn::Sequential> models;
    for (int rank = 0; rank < 2; ++rank) {
      models.push_back(is_deferred ? defer_init(make_model) : make_model());
    }
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const torch::nn::Sequential model = taken(models, group);
      const std::string failure = failure_of([&] { pipeline_of(*model, group); });
      require(failure.find("\"0.weight\" of stage 0 and \"1.weight\" of stage 1 share memory") !=
                  std::string::npos,
              failure);
      const ProcessGroup alone = *group.split({.color = group.rank()});
      pipeline_of(*model, alone, {.schedule = "looped-bfs"});  // one rank has both tensors
    });
    EXPECT_TRUE(result.ok()) << is_deferred << "\n" << result.failures();
  }
}

// A layer that multiplies by a weight that another layer has registered.
struct Borrower : torch::nn::Module {
  explicit Borrower(Tensor given) : weight(std::move(given)) {}
  Tensor forward(const Tensor& x) { return x.matmul(weight); }
  Tensor weight;
};

// A layer on another rank would compute with a copy of the weight that is never updated, so this
// must be an error.
TEST(LayeredPipeline, AWeightThatALayerUsesWithoutRegisteringItIsNoticed) {
  const Tensor x = torch::ones({2, 2});
  const auto square = [](const Tensor& output, const Tensor& target) {
    return torch::mse_loss(output, target);
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const torch::nn::Linear layer(2, 2);
    torch::nn::Sequential model(layer, torch::nn::Tanh(), Borrower(layer->weight),
                                torch::nn::Linear(2, 2));
    {
      // The borrower is on the same rank as the weight here, so there is no error.
      Pipeline pipeline = pipeline_of(*model, group, {}, {.layers_per_stage = {3, 1}});
      pipeline.step(x, x, square);
    }
    {
      Pipeline pipeline = pipeline_of(*model, group);
      const std::string failure = failure_of([&] { pipeline.step(x, x, square); });
      require(
          failure.find("uses \"0.weight\" of stage 0, which another rank has") != std::string::npos,
          failure);
    }
    model->forward(x).sum().backward();  // the pipelines are gone, and their hooks with them
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LayeredPipeline, OnlyTheStagesOfTheRankAreMaterialized) {
  const torch::nn::Sequential plain = make_gpt();
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < 2; ++rank) models.push_back(defer_init(make_gpt));
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const torch::nn::Sequential gpt = taken(models, group);
    const Pipeline pipeline = pipeline_of(*gpt, group);
    const auto values = gpt->named_parameters();
    int num_deferred = 0;
    for (const auto& parameter : plain->named_parameters()) {
      const Tensor& own = values[parameter.key()];
      if (is_deferred(own)) {
        ++num_deferred;
      } else {
        require(torch::equal(own, parameter.value()), parameter.key());
      }
    }
    // The layers of the other rank stay deferred: on rank 0 two blocks and the norm of the head (26
    // parameters), on rank 1 the table of positions and two blocks (25 parameters).
    require(num_deferred == (group.rank() == 0 ? 26 : 25), std::to_string(num_deferred));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

struct Refusal {
  PipelineOptions options;
  StageDivision division;
  std::string sentence;
};

TEST(LayeredPipeline, ADivisionThatDoesNotFitIsRefusedOnAllRanks) {
  const auto two_stages = make_pipeline_schedule(
      {.kind = PipelineScheduleKind::k1F1B, .num_ranks = 2, .num_microbatches = 1});
  const std::vector<Refusal> refusals = {
      {{.schedule = "looped-bfs"},
       {.stages_per_rank = 4},
       "the model has 6 layers, and the schedule 8"},
      {{.schedule = "looped-bfs"},
       {.stages_per_rank = 7},
       "stages_per_rank is 7, expected from 1 to 6"},
      {{.schedule = "1f1b"}, {.stages_per_rank = 2}, "exactly 1 stage(s)"},
      {{.schedule = *two_stages}, {.stages_per_rank = 1}, "stages_per_rank is 1, but the Pipeline"},
      {{.schedule = "2f2b"}, {}, "there is no schedule \"2f2b\"; there are \"gpipe\", \"1f1b\""},
      {{}, {.layers_per_stage = {3, 2}}, "divides 5 layers among 2 stages, but the model has 6"},
      {{}, {.layers_per_stage = {6}}, "divides 6 layers among 1 stages"},
      {{}, {.layers_per_stage = {0, 6}}, "layers_per_stage has the entry 0, expected from 1 to 6"}};
  auto models = make_gpts(2);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    torch::nn::Sequential gpt = taken(models, group);
    for (const Refusal& refusal : refusals) {
      const std::string message =
          failure_of([&] { pipeline_of(*gpt, group, refusal.options, refusal.division); });
      require(message.find(refusal.sentence) != std::string::npos, message);
    }
    const std::string unlike = failure_of([&] {
      pipeline_of(*gpt, group, {},
                  {.layers_per_stage = group.rank() == 0 ? std::vector<int64_t>{3, 3}
                                                         : std::vector<int64_t>{2, 4}});
    });
    require(unlike.find("the number of layers in each stage is") != std::string::npos, unlike);
    pipeline_of(*gpt, group);  // the group is usable
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::layered_pipeline_test
