// Tests that a GPT of transformer layers has the loss and the gradients of one process if ranks
// divide its layers by tensor_parallel_plan(), and also if they divide its sequences in addition.
// Ranks are threads. The vocabulary is odd, so that the ranks have chunks of different sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/transformer/transformer.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::transformer_division_test {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr TransformerOptions kOptions{.vocabulary = 7,
                                      .context = 8,
                                      .embed_dim = 8,
                                      .num_heads = 4,
                                      .num_blocks = 2,
                                      .num_key_value_heads = 2,
                                      .mlp_dim = 10};

torch::nn::Sequential make_gpt(bool is_tied) {
  torch::manual_seed(1);
  const TransformerEmbedding embedding(kOptions);
  torch::nn::Sequential gpt(embedding);
  for (int i = 0; i < kOptions.num_blocks; ++i) gpt->push_back(TransformerBlock(kOptions));
  gpt->push_back(is_tied ? TransformerHead(embedding) : TransformerHead(kOptions));
  gpt->to(torch::kDouble);
  const torch::NoGradGuard no_grad;  // large enough values, so that no term is negligible
  for (Tensor& parameter : gpt->parameters()) parameter.normal_().mul_(0.4);
  return gpt;
}

Tensor tokens_of(int64_t first) {
  return (torch::arange(24).view({3, 8}) * 5 + first).remainder(kOptions.vocabulary);
}

struct Division {
  const char* name;
  bool is_tied;
  bool is_sequence_parallel;
  int context_ranks;  // the ranks that divide sequences; always 2 divide the layers
};

class TransformerDivision : public ::testing::TestWithParam<Division> {};

TEST_P(TransformerDivision, HasTheLossAndTheGradientsOfOneProcess) {
  const Division& division = GetParam();
  const Tensor tokens = tokens_of(0);
  const Tensor targets = tokens_of(1);
  torch::nn::Sequential plain = make_gpt(division.is_tied);
  const Tensor expected =
      torch::nn::functional::cross_entropy(plain->forward(tokens).flatten(0, 1), targets.flatten());
  expected.backward();
  const auto parameters = plain->named_parameters();
  const int num_ranks = 2 * division.context_ranks;
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < num_ranks; ++rank) models.push_back(make_gpt(division.is_tied));
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& world) {
    // This rank's model must be destroyed before the os::System of its group.
    torch::nn::Sequential gpt = std::exchange(models[static_cast<size_t>(world.rank())], nullptr);
    const DeviceMesh mesh(world, {{"cp", division.context_ranks}, {"tp", 2}});
    const auto records = parallelize_module(
        *gpt, mesh["tp"],
        tensor_parallel_plan(*gpt, {.sequence_parallel = division.is_sequence_parallel}));
    std::optional<ContextParallel> context;
    Tensor own_targets = targets;
    VocabParallelCrossEntropyOptions loss_options{.vocabulary = kOptions.vocabulary};
    if (division.context_ranks > 1) {
      context.emplace(mesh.group("cp"), ContextParallelOptions{.num_tokens = 8});
      set_context_parallel(*gpt, *context);
      own_targets = context->shard(targets, 1);
      loss_options.token_group = mesh.group("cp");
    }
    const Tensor loss = vocab_parallel_cross_entropy(gpt->forward(tokens), own_targets,
                                                     mesh.group("tp"), loss_options);
    loss.backward();
    if (context) context->sum_gradients(gpt->parameters());
    require(torch::allclose(loss, expected, 1e-11, 1e-12), "the loss");
    int num_divided = 0;
    for (const ParameterShard& record : records) {
      Tensor part = parameters[record.name].grad();
      if (const Shard* const shard = record.placements.back().shard()) {
        ++num_divided;
        const Chunk chunk = chunk_of(part.size(shard->dim), 2, mesh.coordinate("tp"));
        part = part.narrow(shard->dim, chunk.begin, chunk.size);
      }
      require(torch::allclose(record.values.grad(), part, 1e-9, 1e-12), record.name);
    }
    // The divided parameters are the embedding table, the weight of an untied head, and in each of
    // two blocks the weights and biases of qkv and up, and the weights of output and down: 2 * 6.
    require(num_divided == (division.is_tied ? 13 : 14), std::to_string(num_divided));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(Divisions, TransformerDivision,
                         ::testing::Values(Division{"tied", true, false, 1},
                                           Division{"untied", false, false, 1},
                                           Division{"tied_sequence", true, true, 1},
                                           Division{"untied_sequence", false, true, 1},
                                           Division{"tied_context", true, false, 2}),
                         [](const auto& division) { return std::string(division.param.name); });

// The plan has the full names of the layers, at any depth, so it needs no patterns with stars.
TEST(TensorParallelPlan, NamesTheLayersOfEachPlannedModule) {
  TransformerBlock block(kOptions);
  torch::nn::Sequential blocks;
  blocks->push_back("only", block);
  const auto names_of = [](const std::vector<PlanEntry>& plan) {
    std::vector<std::string> names;
    for (const PlanEntry& entry : plan) {
      names.push_back(entry.pattern + " " + std::string(to_string(entry.style)));
    }
    return names;
  };
  EXPECT_THAT(
      names_of(tensor_parallel_plan(*blocks)),
      ::testing::ElementsAre("only.up kColwise", "only.down kRowwise",
                             "only.attention.qkv kColwise", "only.attention.output kRowwise"));
  EXPECT_THAT(
      names_of(tensor_parallel_plan(*block, {.sequence_parallel = true})),
      ::testing::ElementsAre("up kColwise", "down kRowwise", "norm_1 kSequence", "norm_2 kSequence",
                             "attention.qkv kColwise", "attention.output kRowwise"));
  EXPECT_TRUE(tensor_parallel_plan(*torch::nn::Linear(2, 2)).empty());
}

}  // namespace
}  // namespace cadre::transformer_division_test
