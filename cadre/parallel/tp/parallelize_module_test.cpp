// Tests the values, ParameterShards and gradient norms of a module that parallelize_module() has
// divided, and the errors for modules and plans that it cannot divide.
#include "cadre/parallel/tp/parallelize_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shard_records.h"
#include "cadre/testing/torch/tp_models.h"
#include "cadre/testing/torch/tp_refusal.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::Case;
using testing::DividedGpt;
using testing::DividedMlp;
using testing::error_of;
using testing::GptKind;
using ::testing::HasSubstr;
using testing::make_divided_model;
using testing::refusal_of_plan;
using testing::require;
using testing::run_groups;
using torch::Tensor;

const Case kGpt{"gpt_tied_sequence", "sgd", 4};

// Each rank gets its parts of the initial values that one process has drawn, under the names of the
// undivided module, and a ParameterShard for each parameter.
TEST(ParallelizeModule, KeepsThisRanksPartsOfRankZerosWeights) {
  const auto plain = make_divided_model(kGpt, 1);
  std::vector<std::shared_ptr<testing::DividedModel>> models;
  for (uint64_t rank = 0; rank < 3; ++rank) models.push_back(make_divided_model(kGpt, 1 + rank));
  const auto result = run_groups(3, [&](const ProcessGroup& group, std::string&) {
    // The rank's model must be destroyed before the os::System of its group.
    const auto owned = std::move(models[static_cast<size_t>(group.rank())]);
    testing::DividedModel& model = *owned;
    const DeviceMesh mesh(group, {{"tp", 3}});
    const std::vector<ParameterShard> records = parallelize_module(model, mesh, model.plan());
    const int num_divided = testing::num_divided(records, model, *plain, 0);
    // 11 divided parameters: `tokens`, and in each of two blocks the weights of qkv and output,
    // which have no bias, the weight and bias of up, and the weight of down.
    require(num_divided == 11, "divided: " + std::to_string(num_divided));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ParallelizeModule, TheNormIsThatOfOneProcess) {
  const auto plain = make_divided_model(kGpt, 1);
  torch::manual_seed(9);
  const Tensor batch = plain->make_batch(3);
  plain->loss(plain->forward(batch), batch).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05);
  std::vector<std::shared_ptr<testing::DividedModel>> models;
  for (int rank = 0; rank < 4; ++rank) models.push_back(make_divided_model(kGpt, 1));
  const auto result = run_groups(4, [&](const ProcessGroup& group, std::string&) {
    // The rank's model must be destroyed before the os::System of its group.
    const auto owned = std::move(models[static_cast<size_t>(group.rank())]);
    testing::DividedModel& model = *owned;
    const DeviceMesh mesh(group, {{"tp", 4}});
    const std::vector<ParameterShard> records = parallelize_module(model, mesh, model.plan());
    model.group = group;
    model.loss(model.forward(batch), batch).backward();
    const double norm = clip_grad_norm_(records, 0.05);
    require(std::abs(norm - expected) < 1e-10 * expected,
            std::to_string(norm) + " is not " + std::to_string(expected));
    const Tensor whole = plain->named_parameters()["norm.weight"].grad();
    require(torch::allclose(model.named_parameters()["norm.weight"].grad(), whole, 1e-9, 1e-12),
            "clipped gradients");
    // A norm over this rank's parts only would differ between ranks, so clip_grad_norm_() of plain
    // tensors throws.
    require(error_of(
                [&] {
                  const std::vector<Tensor> parameters = model.parameters();
                  clip_grad_norm_(std::span<const Tensor>(parameters), 1.0);
                },
                ErrorCode::kInvalidArgument)
                    .find("shard of \"tokens.weight\"") != std::string::npos,
            "a norm over parts must be an error");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Dividing a module keeps its parameter tensors, so an optimizer that was made earlier still trains
// them.
TEST(ParallelizeModule, AnOptimizerMadeBeforeTrainsTheParts) {
  std::vector<std::shared_ptr<DividedMlp>> models = {std::make_shared<DividedMlp>(),
                                                     std::make_shared<DividedMlp>()};
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto owned = std::move(models[static_cast<size_t>(group.rank())]);
    DividedMlp& model = *owned;
    torch::optim::AdamW optimizer(model.parameters());
    parallelize_module(model, DeviceMesh(group, {{"tp", 2}}), model.plan());
    const Tensor before = model.first->weight.detach().clone();
    const Tensor x = torch::ones({4, 12});
    model.loss(model.forward(x), x).backward();
    optimizer.step();
    require(!torch::equal(before, model.first->weight), "the optimizer has other tensors");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ParallelizeModule, OneRankLeavesPlainLayers) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    DividedMlp model;
    const DeviceMesh mesh(group, {{"tp", 1}});
    parallelize_module(model, mesh, model.plan());
    require(model.first->clone() != nullptr, "a plain layer can be copied");
    const std::string message = error_of([&] { parallelize_module(model, mesh, model.plan()); },
                                         ErrorCode::kInvalidArgument);
    require(message.starts_with("\"first\" cannot be kColwise on the 1 ranks of group \"") &&
                message.find("it is kColwise on the 1 ranks of group") != std::string::npos &&
                message.ends_with("already; parallelize a module once"),
            message);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ParallelizeModule, RefusesPlansThatDoNotFit) {
  DividedMlp mlp;
  EXPECT_EQ(refusal_of_plan(mlp, {{"blocks.*", ParallelStyle::kColwise}}),
            "parallelize_module: the pattern \"blocks.*\" (kColwise) matches none of the 5 modules "
            "in the module; their names are \"first\" \"second\" \"third\" \"fourth\"");
  DividedGpt gpt(GptKind{});
  // A star in a pattern does not match a dot, so "*qkv" does not match a name with dots.
  EXPECT_THAT(refusal_of_plan(gpt, {{"*qkv", ParallelStyle::kColwise}}), HasSubstr("matches none"));
  EXPECT_EQ(
      refusal_of_plan(gpt,
                      {{"*.up", ParallelStyle::kColwise}, {"first.u*", ParallelStyle::kRowwise}}),
      "parallelize_module: two patterns, \"*.up\" (kColwise) and \"first.u*\" (kRowwise), match "
      "\"first.up\"");
  EXPECT_EQ(refusal_of_plan(gpt, {{"first.attention", ParallelStyle::kColwise}}),
            "parallelize_module: the pattern \"first.attention\" (kColwise) matches "
            "\"first.attention\", a cadre::SelfAttentionImpl, which is no layer that can be "
            "divided; make it a cadre::Linear, Embedding, LayerNorm or CounterBasedDropout");
  EXPECT_EQ(
      refusal_of_plan(
          mlp, {{.pattern = "first", .style = ParallelStyle::kRowwise, .gather_output = true}}),
      "parallelize_module: the entry \"first\" (kRowwise) has gather_output, which only a "
      "kColwise layer obeys; leave it out");
  EXPECT_EQ(
      refusal_of_plan(
          mlp,
          {{.pattern = "first", .style = ParallelStyle::kColwise, .input_is_parallel = false}}),
      "parallelize_module: the entry \"first\" (kColwise) has input_is_parallel = false, "
      "which only a kRowwise layer obeys; leave it out");
  EXPECT_THAT(
      refusal_of_plan(
          gpt,
          {{.pattern = "tokens", .style = ParallelStyle::kRowwise, .input_is_parallel = false}}),
      HasSubstr("leave out input_is_parallel = false"));
  EXPECT_THAT(refusal_of_plan(gpt, {{.pattern = "*.dropout_hidden",
                                     .style = ParallelStyle::kColwise,
                                     .gather_output = true}}),
              HasSubstr("leave out gather_output"));
  const std::string on_group = " on the 1 ranks of group \"tp\": ";
  EXPECT_EQ(refusal_of_plan(gpt, {{"*.norm_1", ParallelStyle::kColwise}}),
            "\"first.norm_1\" cannot be kColwise" + on_group +
                "a norm needs all features of a token: it is kSequence or kReplicated");
  EXPECT_EQ(refusal_of_plan(gpt, {{"tokens", ParallelStyle::kColwise}}),
            "\"tokens\" cannot be kColwise" + on_group +
                "an embedding can be divided by its vocabulary only (kRowwise), or be kSequence or "
                "kReplicated");
  EXPECT_THAT(refusal_of_plan(gpt, {{"*.dropout_1", ParallelStyle::kColwise}}),
              HasSubstr("set options.features"));
  EXPECT_EQ(refusal_of_plan(gpt, {{"*.norm_1", ParallelStyle::kSequence}}),
            "parallelize_module: no pattern of the plan matches \"tokens\", which has parameters. "
            "The plan is sequence-parallel, so name it kSequence if its inputs are shards of the "
            "sequence, and kReplicated if they are whole sequences");
  DividedGpt sequence(GptKind{.is_sequence_parallel = true});
  std::vector<PlanEntry> without_dropout = sequence.plan();
  std::erase_if(without_dropout, [](const PlanEntry& e) { return e.pattern == "*.dropout_2"; });
  EXPECT_EQ(refusal_of_plan(sequence, without_dropout),
            "parallelize_module: no pattern of the plan matches \"first.dropout_2\", whose style "
            "matters. The plan is sequence-parallel, so name it kSequence if its inputs are shards "
            "of the sequence, and kReplicated if they are whole sequences");
  EXPECT_FALSE(gpt.tokens->is_parallelized());
  gpt.tokens->weight.mutable_grad() = torch::zeros_like(gpt.tokens->weight);
  EXPECT_EQ(refusal_of_plan(gpt, gpt.plan()),
            "\"tokens\" cannot be kRowwise" + on_group +
                "its weight has a gradient; parallelize a module before its first backward, or "
                "zero_grad() before");
}

TEST(ParallelizeModule, RefusesAnAxisTooManyAndPlansThatDiffer) {
  const auto result = run_groups(4, [](const ProcessGroup& group) {
    const auto refused = [](const auto& call, const std::string& sentence) {
      const std::string message = error_of(call, ErrorCode::kInvalidArgument);
      require(message == sentence, message);
    };
    DividedMlp model;
    const DeviceMesh mesh(group, {{"dp", 2}, {"tp", 2}});
    refused([&] { parallelize_module(model, mesh, model.plan()); },
            "parallelize_module: the mesh {dp: 2, tp: 2} has 2 axes; pass one of them: "
            "mesh[\"tp\"]");
    const ParallelStyle style =
        mesh.coordinate("tp") == 0 ? ParallelStyle::kColwise : ParallelStyle::kRowwise;
    refused(
        [&] {
          parallelize_module(model, mesh["tp"], {{"first", style}});
        },
        "parallelize_module on group \"tp\": \"first\" is kColwise, with blocks of 1 features on "
        "rank 0 and kRowwise, with blocks of 1 features on rank 1; pass the same module and plan "
        "on "
        "all ranks");
    parallelize_module(model, mesh["tp"], {{"first", ParallelStyle::kColwise}});
    refused(
        [&] {
          model.forward(torch::ones({2, 12}));
        },
        format("\"second\", which is kReplicated on rank {} of 2 of group \"tp\", takes 25 "
               "features, but its input has the sizes (2, {}). After a column-parallel layer, "
               "whose output is divided, use a row-parallel layer with input_is_parallel, or set "
               "gather_output for the column-parallel layer",
               mesh.coordinate("tp"), mesh.coordinate("tp") == 0 ? 13 : 12));
    mesh.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two layers share one tensor, which must be divided only once.
TEST(ParallelizeModule, AWeightOfTwoLayersIsDividedOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      table = register_module("table", Embedding(11, 6));
      head = register_module("head", Linear(torch::nn::LinearOptions(6, 11).bias(false)));
      head->weight = table->weight;
    }
    Embedding table{nullptr};
    Linear head{nullptr};
  };
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Tied model;
    const DeviceMesh mesh(group, {{"tp", 2}});
    parallelize_module(model, mesh,
                       {{"table", ParallelStyle::kRowwise}, {"head", ParallelStyle::kColwise}});
    require(model.head->weight.size(0) == chunk_of(11, 2, group.rank()).size, "divided once");
    Tied other;
    require(error_of(
                [&] {
                  parallelize_module(other, mesh, {{"table", ParallelStyle::kRowwise}});
                },
                ErrorCode::kInvalidArgument)
                    .find("is also a parameter of another layer") != std::string::npos,
            "two ways to divide one weight");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The time for a pattern with many stars must be at most the product of the two lengths, not
// exponential.
TEST(ParallelizeModule, AStarMatchesAnyTextWithoutDots) {
  const std::string name = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab";
  struct Outer : torch::nn::Module {
    explicit Outer(const std::string& name) {
      inner = register_module("inner", std::make_shared<torch::nn::Module>());
      inner->register_module(name, Linear(2, 2));
    }
    std::shared_ptr<torch::nn::Module> inner;
  };
  const auto refusal_of = [&](const std::string& pattern) {
    std::string message;
    const auto result = run_groups(1, [&](const ProcessGroup& group) {
      Outer outer(name);
      const DeviceMesh mesh(group, {{"tp", 1}});
      message = error_of(
          [&] {
            parallelize_module(outer, mesh, {{pattern, ParallelStyle::kColwise}});
          },
          ErrorCode::kInvalidArgument);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    return message;
  };
  std::string stars;
  for (int i = 0; i < 30; ++i) stars += "*a";
  for (const std::string& pattern :
       {"inner." + stars + "b", "*." + stars + "*b*", std::string("i*r.*ab"), "*r*." + name}) {
    EXPECT_EQ(refusal_of(pattern), "no error") << pattern;
  }
  for (const std::string& pattern : {"inner." + stars + "c", "*." + stars + "*bb", stars + "b",
                                     "inner*" + name, std::string("*.*.*"), std::string("*.")}) {
    EXPECT_THAT(refusal_of(pattern), HasSubstr("matches none")) << pattern;
  }
}

// If parallelize_module() fails on one rank only, all ranks throw that rank's error, and the group
// stays usable.
TEST(ParallelizeModule, AllRanksRefuseWhatOneRefuses) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto refused = [](const auto& call, const std::string& sentence) {
      const std::string message = error_of(call, ErrorCode::kInvalidArgument);
      require(message == sentence, message);
    };
    const DeviceMesh mesh(group, {{"tp", 2}});
    DividedMlp model;
    if (group.rank() == 1) model.first->weight.mutable_grad() = torch::ones({25, 12});
    refused([&] { parallelize_module(model, mesh, model.plan()); },
            "\"first\" cannot be kColwise on the 2 ranks of group \"tp\": its weight has a "
            "gradient; parallelize a module before its first backward, or zero_grad() before (on "
            "rank 1 of 2 of group \"tp\")");
    require(!model.first->is_parallelized(), "a refused module is unchanged");
    model.zero_grad();
    refused(
        [&] {
          parallelize_module(model, mesh,
                             {{group.rank() == 1 ? "5th" : "first", ParallelStyle::kColwise}});
        },
        "parallelize_module: the pattern \"5th\" (kColwise) matches none of the 5 modules in the "
        "module; their names are \"first\" \"second\" \"third\" \"fourth\" (on rank 1 of 2 of "
        "group \"tp\")");
    parallelize_module(model, mesh, model.plan());
    torch::nn::EmbeddingOptions options(8, 6);
    if (group.rank() == 0) options.max_norm(1);
    refused([&] { VocabParallelEmbedding(options, group); },
            "\"VocabParallelEmbedding\" cannot be kRowwise on the 2 ranks of group \"world\": an "
            "embedding with max_norm, scale_grad_by_freq or sparse changes or counts rows that "
            "another rank has; construct it without (on rank 0 of 2 of group \"world\")");
    require(model.forward(torch::ones({2, 12})).size(1) == 3, "the group is usable");
    mesh.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// These options (eps, is_causal, the seed of dropout) change no weight, so only a comparison of the
// options finds that the ranks would compute different functions.
TEST(ParallelizeModule, OptionsThatDifferBetweenRanksAreRefusedOnAll) {
  struct Model : torch::nn::Module {
    Model(double eps, bool is_causal, uint64_t seed) {
      norm = register_module("norm", LayerNorm(torch::nn::LayerNormOptions({4}).eps(eps)));
      attention = register_module("attention",
                                  SelfAttention(SelfAttentionOptions{
                                      .embed_dim = 4, .num_heads = 2, .is_causal = is_causal}));
      dropout = register_module(
          "dropout",
          CounterBasedDropout(CounterBasedDropoutOptions{
              .layer = 1, .stream = std::make_shared<DropoutStream>(DropoutStream{.seed = seed})}));
    }
    LayerNorm norm{nullptr};
    SelfAttention attention{nullptr};
    CounterBasedDropout dropout{nullptr};
  };
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"tp", 2}});
    const std::vector<PlanEntry> plan = {{"attention.qkv", ParallelStyle::kColwise},
                                         {"attention.output", ParallelStyle::kRowwise}};
    const bool is_first = group.rank() == 0;
    const auto refused = [&](Model model, const std::string& sentence) {
      const std::string message =
          error_of([&] { parallelize_module(model, mesh, plan); }, ErrorCode::kInvalidArgument);
      require(message.find(sentence) != std::string::npos, message);
      require(model.attention->qkv->weight.size(0) == 12, "a refused module is unchanged");
    };
    refused(Model(is_first ? 1e-5 : 1e-6, true, 1), "eps 1e-05");
    refused(Model(1e-5, is_first, 1), "is_causal true");
    refused(Model(1e-5, true, is_first ? 1 : 2), "seed 1");
    Model model(1e-5, true, 1);
    parallelize_module(model, mesh, plan);
    mesh.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// parallelize_module.h recommends copy_to_group() for a parameter that is applied to this rank's
// part of the features.
TEST(ParallelizeModule, CopyToGroupSumsTheGradientOfAParameterBetweenDividedLayers) {
  struct Scaled : torch::nn::Module {
    Scaled() {
      up = register_module("up", Linear(4, 7));
      slope = register_parameter("slope", torch::full({1}, 0.25));
      down = register_module("down", Linear(7, 4));
      to(torch::kDouble);
    }
    Tensor forward(const Tensor& x) {
      const Tensor own = group ? functional::copy_to_group(slope, *group) : slope;
      return down(torch::prelu(up(x), own));
    }
    Linear up{nullptr}, down{nullptr};
    Tensor slope;
    std::optional<ProcessGroup> group;
  };
  torch::manual_seed(3);
  const Tensor x = torch::randn({8, 4}, torch::kDouble);
  Scaled plain;
  plain.forward(x).square().sum().backward();
  const Tensor expected = plain.slope.grad();
  const std::vector<Tensor> weights = plain.parameters();
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const torch::AutoGradMode with_gradients(true);
    Scaled model;
    const std::vector<Tensor> own = model.parameters();
    for (size_t i = 0; i < own.size(); ++i) own[i].set_data(weights[i].detach().clone());
    parallelize_module(model, DeviceMesh(group, {{"tp", 2}}),
                       {{"up", ParallelStyle::kColwise}, {"down", ParallelStyle::kRowwise}});
    model.group = group;
    model.forward(x).square().sum().backward();
    require(torch::allclose(model.slope.grad(), expected, 1e-10, 1e-12), "the gradient");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
