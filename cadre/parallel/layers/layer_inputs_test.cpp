// Tests layers, undivided and divided, with inputs of unusual sizes: an empty batch, no tokens, one
// dimension too few or too many. Also tests options that are out of range or differ between ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::error_of;
using testing::expect_on_ranks;
using ::testing::HasSubstr;
using testing::require;
using testing::require_refused;
using torch::Tensor;

// Runs a forward and backward of an input with no elements. The gradients of parameters have the
// sizes of the layer's parameters, which may be divided.
void require_empty_pass(SelfAttentionImpl& layer, const std::vector<int64_t>& sizes) {
  const Tensor x = torch::zeros(sizes).requires_grad_();
  const Tensor output = layer.forward(x);
  require(output.sizes() == at::IntArrayRef(sizes), "sizes of the output");
  output.sum().backward();
  require(x.grad().sizes() == at::IntArrayRef(sizes), "sizes of the gradient");
  for (const Tensor& parameter : layer.parameters()) {
    if (parameter.grad().defined()) require(parameter.grad().abs().sum().item<double>() == 0, "0");
  }
  const torch::NoGradGuard no_grad;
  require(layer.forward(x).sizes() == at::IntArrayRef(sizes), "sizes without grad");
}

const SelfAttentionOptions kHeads{.embed_dim = 8, .num_heads = 4, .num_key_value_heads = 2};

TEST(LayerInputs, AttentionTakesNoRowsAndNoTokens) {
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{0, 4, 8}, {3, 0, 8}, {0, 0, 8}}) {
    for (const bool is_causal : {false, true}) {
      SelfAttentionOptions options = kHeads;
      options.is_causal = is_causal;
      SelfAttention plain(options);
      require_empty_pass(*plain, sizes);
      options.dropout =
          CounterBasedDropoutOptions{.layer = 1, .stream = std::make_shared<DropoutStream>()};
      SelfAttention dropped(options);
      require_empty_pass(*dropped, sizes);
    }
    expect_on_ranks(2, [&](const ProcessGroup& group) {
      ParallelSelfAttention divided(kHeads, group);
      require_empty_pass(*divided, sizes);
      if (sizes[1] == 0) {
        ParallelSelfAttention sequence(kHeads, group,
                                       ParallelSelfAttentionOptions{.sequence_parallel = true});
        require_empty_pass(*sequence, sizes);
      }
    });
  }
}

// A sequence of one token is divided among 2 ranks, so one rank has no token. Empty batches are
// tested, too.
TEST(LayerInputs, AttentionTakesNoTokensOnARankOfASequence) {
  torch::manual_seed(1);
  SelfAttention plain(kHeads);
  for (const int64_t rows : {2, 0}) {
    const Tensor whole = torch::arange(rows * 8, torch::kFloat).view({rows, 1, 8}).sin();
    const Tensor expected = plain(whole).detach();
    for (const ContextForm form : {ContextForm::kRing, ContextForm::kAllToAll}) {
      expect_on_ranks(2, [&](const ProcessGroup& group) {
        SelfAttention layer(kHeads);
        for (size_t i = 0; i < plain->parameters().size(); ++i) {
          layer->parameters()[i].set_data(plain->parameters()[i].detach().clone());
        }
        const ContextParallel context(group, {.num_tokens = 1, .form = form});
        set_context_parallel(*layer, context);
        const Tensor x = context.shard(whole, 1).requires_grad_();
        const Tensor output = layer(x);
        require(torch::allclose(context.unshard(output, 1).detach(), expected, 1e-5, 1e-6),
                "values");
        output.sum().backward();
        require(x.grad().sizes() == x.sizes(), "gradient");
      });
    }
  }
}

TEST(LayerInputs, AttentionRefusesADimensionTooFewOrMany) {
  SelfAttention layer(kHeads);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{5, 8}, {8}, {2, 3, 5, 8}, {2, 5, 7}, {}}) {
    EXPECT_THAT(error_of([&] { layer(torch::ones(sizes)); }, ErrorCode::kInvalidArgument),
                HasSubstr("expected (B, T, 8)"));
  }
}

TEST(LayerInputs, OptionsOutOfRangeAreRefused) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const SelfAttentionOptions& options : std::vector<SelfAttentionOptions>{
           {.embed_dim = 0, .num_heads = 1},
           {.embed_dim = -4, .num_heads = 2},
           {.embed_dim = -4, .num_heads = -2},
           {.embed_dim = 8, .num_heads = 0},
           {.embed_dim = kHuge, .num_heads = 1},
           {.embed_dim = 8, .num_heads = 2, .num_key_value_heads = -1},
           {.embed_dim = 8, .num_heads = 2, .dropout = CounterBasedDropoutOptions{.layer = 1}}}) {
    EXPECT_THAT(error_of([&] { SelfAttention layer(options); }, ErrorCode::kInvalidArgument),
                HasSubstr("SelfAttention: "));
  }
  Linear linear(8, 8);
  for (const int64_t size : {int64_t{0}, int64_t{-3}}) {
    EXPECT_THAT(error_of([&] { linear->set_block_size(size); }, ErrorCode::kInvalidArgument),
                HasSubstr("expected at least 1"));
  }
  const auto stream = std::make_shared<DropoutStream>();
  for (const int64_t features : {int64_t{0}, int64_t{-3}}) {
    const CounterBasedDropoutOptions options{.layer = 1, .stream = stream, .features = features};
    EXPECT_THAT(error_of([&] { CounterBasedDropout layer(options); }, ErrorCode::kInvalidArgument),
                HasSubstr("options.features is"));
  }
  const DropoutRegion far{.sizes = {8}, .offsets = {kHuge}};
  EXPECT_THAT(error_of(
                  [&] {
                    counter_based_dropout(torch::ones({2, 8}), 0.5, *stream, 1, far);
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("does not fit into a tensor"));
  // The options are a public member, so a program can change them after construction.
  CounterBasedDropout dropout(CounterBasedDropoutOptions{.layer = 1, .stream = stream});
  dropout->options.stream = nullptr;
  EXPECT_THAT(error_of(
                  [&] {
                    dropout(torch::ones({2, 8}));
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("options.stream is null"));
  SelfAttention attention(kHeads);
  attention->options.dropout = CounterBasedDropoutOptions{.layer = 1};
  EXPECT_THAT(error_of(
                  [&] {
                    attention(torch::ones({1, 2, 8}));
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("dropout->stream is null"));
}

// 10 features in blocks of 4 cannot be divided without cutting a block.
TEST(LayerInputs, FeaturesThatAreNoBlocksAreNotDivided) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    Linear layer(6, 10);
    layer->set_block_size(4);
    DividedParameters divided;
    require_refused(
        [&] { layer->check({.group = group, .style = ParallelStyle::kColwise}, "up", divided); },
        "its 10 features are no multiple of the size of a block, 4");
    LayerNorm norm(torch::nn::LayerNormOptions({4, 6}));
    require_refused(
        [&] { norm->check({.group = group, .style = ParallelStyle::kSequence}, "norm", divided); },
        "its normalized_shape (4, 6) covers more dimensions than the features of a token");
  });
}

// Divided layers accept the same numbers of dimensions as torch::nn::Linear and Embedding.
TEST(LayerInputs, DividedLayersTakeTheSizesThatPlainOnesTake) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    ColumnParallelLinear up(torch::nn::LinearOptions(6, 5), group,
                            ColumnParallelOptions{.gather_output = true});
    RowParallelLinear down(torch::nn::LinearOptions(6, 5), group,
                           RowParallelOptions{.input_is_parallel = false});
    VocabParallelEmbedding table(torch::nn::EmbeddingOptions(7, 4), group);
    for (const std::vector<int64_t>& rows :
         std::vector<std::vector<int64_t>>{{}, {0}, {3}, {2, 0}, {2, 3, 2}}) {
      std::vector<int64_t> sizes = rows;
      sizes.push_back(6);
      for (const bool is_up : {true, false}) {
        const Tensor x = torch::ones(sizes).requires_grad_();
        const Tensor y = is_up ? up(x) : down(x);
        sizes.back() = 5;
        require(y.sizes() == at::IntArrayRef(sizes), "sizes of a linear layer");
        sizes.back() = 6;
        y.sum().backward();
        require(x.grad().sizes() == at::IntArrayRef(sizes), "sizes of its gradient");
      }
      sizes.back() = 4;
      require(table(torch::zeros(rows, torch::kLong)).sizes() == at::IntArrayRef(sizes),
              "sizes of an embedding");
    }
    require_refused([&] { table(torch::zeros({2})); }, "the indices are Float");
  });
}

// A constructor with a group compares the options of the ranks.
TEST(LayerInputs, OptionsThatDifferBetweenRanksAreRefusedOnAll) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const bool is_first = group.rank() == 0;
    require_refused(
        [&] {
          ColumnParallelLinear(torch::nn::LinearOptions(4, 4), group,
                               ColumnParallelOptions{.gather_output = is_first});
        },
        "\"ColumnParallelLinear\" is kColwise, gather_output, with blocks of 1 features on rank 0 "
        "and kColwise, with blocks of 1 features on rank 1; pass the same options on all ranks");
    require_refused(
        [&] {
          VocabParallelEmbedding(torch::nn::EmbeddingOptions(8, 4).padding_idx(is_first ? 1 : 2),
                                 group);
        },
        "padding_idx 1");
    RowParallelLinear usable(torch::nn::LinearOptions(4, 4), group);
  });
}

}  // namespace
}  // namespace cadre
