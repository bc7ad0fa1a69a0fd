// Tests which tokens of a sequence each rank has, shard() and unshard(), the loss and the sum of
// gradients over the tokens of all ranks, and the errors for modules that cannot get a part of a
// sequence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::expect_on_ranks;
using testing::require;
using testing::require_refused;
using torch::Tensor;

constexpr SequenceOrder kBothOrders[] = {SequenceOrder::kContiguous, SequenceOrder::kZigzag};

// The expected positions are given as literals. Of 4 chunks, rank 0 has chunks 0 and 3, and rank 1
// has chunks 1 and 2.
TEST(ContextParallel, ZigzagPairsTheFirstChunkWithTheLast) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto positions_of = [&](int64_t num_tokens, SequenceOrder order) {
      const Tensor positions =
          ContextParallel(group, {.num_tokens = num_tokens, .order = order}).positions();
      return std::vector<int64_t>(positions.data_ptr<int64_t>(),
                                  positions.data_ptr<int64_t>() + positions.numel());
    };
    using Numbers = std::vector<int64_t>;
    const bool is_first = group.rank() == 0;
    require(positions_of(8, SequenceOrder::kZigzag) ==
                (is_first ? Numbers{0, 1, 6, 7} : Numbers{2, 3, 4, 5}),
            "8 tokens");
    require(positions_of(8, SequenceOrder::kContiguous) ==
                (is_first ? Numbers{0, 1, 2, 3} : Numbers{4, 5, 6, 7}),
            "8 tokens in order");
    // 7 tokens in 4 chunks: a chunk has ceil(7 / 4) = 2 tokens, but the last has one. If a rank has
    // two neighbouring chunks, these form one run of ascending positions.
    require(positions_of(7, SequenceOrder::kZigzag) ==
                (is_first ? Numbers{0, 1, 6} : Numbers{2, 3, 4, 5}),
            "7 tokens");
    require(positions_of(1, SequenceOrder::kZigzag) == (is_first ? Numbers{0} : Numbers{}),
            "1 token");
  });
}

TEST(ContextParallel, UnshardIsTheReverseOfShardAlsoForGradients) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on_ranks(num_ranks, [](const ProcessGroup& group) {
      for (const SequenceOrder order : kBothOrders) {
        for (const int64_t num_tokens : {1, 5, 8, 24}) {
          const ContextParallel context(group, {.num_tokens = num_tokens, .order = order});
          const Tensor whole =
              torch::arange(2 * num_tokens * 3, torch::kDouble).sin().view({2, num_tokens, 3});
          const Tensor leaf = context.shard(whole, -2).requires_grad_(true);
          const Tensor again = context.unshard(leaf, 1);
          require(torch::equal(again.detach(), whole), "values");
          // Every rank's loss is the same, and the backward sums over the losses of all ranks, so
          // the gradient is world_size times that of one loss.
          (again * whole).sum().backward();
          require(torch::allclose(leaf.grad(), context.shard(whole, 1) * group.world_size(), 1e-14),
                  "gradients");
          const Tensor tokens = torch::arange(num_tokens);
          require(torch::equal(context.unshard(context.shard(tokens, 0), 0), tokens), "integers");
          require(
              torch::equal(context.in_sequence_order(context.in_rank_order(tokens, 0), 0), tokens),
              "orders");
        }
      }
    });
  }
}

// Ranks have unequal numbers of tokens, some of which the loss ignores. So the mean over all tokens
// is not the mean of the ranks' means.
TEST(ContextParallel, TheLossIsTheMeanOverTheTokensOfAllRanks) {
  const Tensor x = torch::arange(11, torch::kDouble).sin();
  const Tensor counts = torch::arange(11).remainder(3).ne(0);
  const Tensor w = torch::tensor(0.7, torch::kDouble).requires_grad_(true);
  const Tensor expected = (x * w).square().masked_select(counts).mean();
  expected.backward();
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on_ranks(num_ranks, [&](const ProcessGroup& group) {
      const ContextParallel context(group, {.num_tokens = 11});
      const Tensor own = torch::tensor(0.7, torch::kDouble).requires_grad_(true);
      const Tensor unused = torch::ones({2}, torch::kDouble).requires_grad_(true);
      const Tensor of_first = torch::ones({2}, torch::kDouble).requires_grad_(true);
      const Tensor frozen = torch::ones({2}, torch::kDouble);
      const Tensor mask = context.shard(counts, 0);
      const Tensor loss =
          context.mean_over_tokens((context.shard(x, 0) * own).square().masked_select(mask).sum(),
                                   mask.sum().item<int64_t>());
      require(torch::allclose(loss, expected, 1e-14), "loss");
      loss.backward();
      if (group.rank() == 0) of_first.sum().backward();
      context.sum_gradients({own, unused, own, of_first, frozen});
      require(torch::allclose(own.grad(), w.grad(), 1e-14), "gradient of a tied weight");
      require(torch::equal(of_first.grad(), torch::ones({2}, torch::kDouble)),
              "gradient of one rank");
      require(!unused.grad().defined() && !frozen.grad().defined(), "no gradient");
    });
  }
}

// The dropout mask of a token is the same on a rank as in one process.
TEST(ContextParallel, DropoutOfActivationsIsThatOfOneProcess) {
  const auto stream = std::make_shared<DropoutStream>(DropoutStream{.seed = 3});
  const CounterBasedDropoutOptions options{.p = 0.4, .layer = 2, .stream = stream};
  const Tensor x = torch::ones({2, 13, 7});
  const Tensor expected = CounterBasedDropout(options)(x);
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on_ranks(num_ranks, [&](const ProcessGroup& group) {
      for (const SequenceOrder order : kBothOrders) {
        const ContextParallel context(group, {.num_tokens = 13, .order = order});
        CounterBasedDropout dropout(options);
        set_context_parallel(*dropout, context);
        require(torch::equal(dropout(context.shard(x, 1)), context.shard(expected, 1)), "dropout");
      }
    });
  }
}

TEST(ContextParallel, RefusesWhatDoesNotFit) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const SequenceOrder order =
        group.rank() == 0 ? SequenceOrder::kZigzag : SequenceOrder::kContiguous;
    require_refused(
        [&] { ContextParallel(group, {.num_tokens = 8, .order = order}); },
        "order is kZigzag on rank 0 and kContiguous on rank 1; pass the same options on all ranks");
    require_refused([&] { ContextParallel(group, {.num_tokens = 8 * group.rank()}); },
                    "num_tokens is 0, expected at least 1");
    require_refused([&] { ContextParallel(group, {.num_tokens = int64_t{1} << 62}); },
                    "num_tokens is 4611686018427387904");
    require_refused([&] { ContextParallel(group, {.num_tokens = 0}); },
                    "num_tokens is 0, expected at least 1");
    const ContextParallel context(group, {.num_tokens = 8});
    require_refused(
        [&] {
          context.shard(torch::ones({2, 4}), 1);
        },
        "expected 8 tokens in dimension 1 of a tensor of the sizes (2, 4); the sequence "
        "has 8 tokens, of which this rank has 4");
    require_refused(
        [&] {
          context.unshard(torch::ones({2, 8}), 1);
        },
        "expected 4 tokens in dimension 1");
    const Tensor sparse = torch::ones({3}).requires_grad_(true);
    if (group.rank() == 1) sparse.mutable_grad() = torch::ones({3}).to_sparse();
    require_refused([&] { context.sum_gradients({sparse}); },
                    "the gradient of a parameter of the sizes (3) is not dense");
    const Tensor other = torch::ones({group.rank() + 3}).requires_grad_(true);
    require_refused([&] { context.sum_gradients({other}); },
                    "trained parameter 0 is Float (3) on rank 0 and Float (4) on rank 1");
    require_refused([&] { context.mean_over_tokens(torch::ones({}), -group.rank()); },
                    "the number of tokens -1");
    require_refused([&] { context.mean_over_tokens(torch::ones({2 - group.rank()}), 1); },
                    "the sum of the losses is Float (2)");
    torch::nn::Linear linear(2, 2);
    require_refused([&] { set_context_parallel(*linear, context); },
                    "has no SelfAttention or CounterBasedDropout of Cadre");
    SelfAttention attention(SelfAttentionOptions{.embed_dim = 4, .num_heads = 2});
    set_context_parallel(*attention, context);
    require_refused(
        [&] {
          attention(torch::ones({2, 8, 4}));
        },
        "do not have this rank's 4 of 8 tokens");
    CounterBasedDropout dropout(
        CounterBasedDropoutOptions{.layer = 1, .stream = std::make_shared<DropoutStream>()});
    set_context_parallel(*dropout, context);
    for (const int64_t num_tokens : {8, 5, 3, 1, 0}) {
      require_refused(
          [&] {
            dropout(torch::ones({2, num_tokens, 4}));
          },
          format(
              "the input has the sizes (2, {}, 4), but this layer needs (B, ..., T, D) with T = 4, "
              "this rank's share of the 8 tokens",
              num_tokens));
    }
    require(dropout(torch::ones({2, 4, 4})).size(1) == 4, "this rank's tokens");
  });
}

// These layers combine tokens. Without the error each rank would silently combine its own tokens
// only.
TEST(ContextParallel, RefusesLayersOfLibtorchThatCombineTokens) {
  namespace nn = torch::nn;
  struct Mixed : nn::Module {
    explicit Mixed(const std::shared_ptr<nn::Module>& other) {
      attention = register_module(
          "attention", SelfAttention(SelfAttentionOptions{.embed_dim = 4, .num_heads = 2}));
      register_module("other", other);
    }
    SelfAttention attention{nullptr};
  };
  const std::vector<std::shared_ptr<nn::Module>> mixing = {
      nn::MultiheadAttention(4, 2).ptr(),
      nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(4, 2)).ptr(),
      nn::TransformerDecoderLayer(nn::TransformerDecoderLayerOptions(4, 2)).ptr(),
      nn::RNN(4, 4).ptr(),
      nn::LSTM(4, 4).ptr(),
      nn::GRU(4, 4).ptr(),
      nn::Conv1d(nn::Conv1dOptions(4, 4, 3)).ptr(),
      nn::BatchNorm1d(4).ptr(),
      nn::InstanceNorm1d(4).ptr()};
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const ContextParallel context(group, {.num_tokens = 8});
    const Tensor whole = torch::ones({1, 8, 4});
    for (const auto& other : mixing) {
      Mixed model(other);
      require_refused([&] { set_context_parallel(model, context); },
                      "set_context_parallel: \"other\", a ");
      // The error has left the module unchanged: its attention still takes whole sequences.
      require(model.attention(whole).size(1) == 8, "unchanged");
      // This module is accepted, because none of its layers combines tokens in another way.
      set_context_parallel(*model.attention, context);
    }
    Mixed single(nn::Conv1d(nn::Conv1dOptions(4, 4, 1)).ptr());
    set_context_parallel(single, context);
  });
}

// The ranks' modules differ in two ways: first in the options of a layer, then rank 1 alone has no
// attention layer.
TEST(ContextParallel, ModulesThatDifferBetweenRanksAreRefusedOnAll) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const ContextParallel context(group, {.num_tokens = 8});
    const auto stream =
        std::make_shared<DropoutStream>(DropoutStream{.seed = static_cast<uint64_t>(group.rank())});
    CounterBasedDropout dropout(CounterBasedDropoutOptions{.layer = 1, .stream = stream});
    require_refused([&] { set_context_parallel(*dropout, context); },
                    "the layer \"\" is p 0.5, layer 1, seed 0, features not given on rank 0 and p "
                    "0.5, layer 1, seed 1");
    torch::nn::Linear linear(2, 2);
    SelfAttention attention(SelfAttentionOptions{.embed_dim = 4, .num_heads = 2});
    torch::nn::Module& module =
        group.rank() == 0 ? static_cast<torch::nn::Module&>(*attention) : *linear;
    require_refused([&] { set_context_parallel(module, context); },
                    "has no SelfAttention or CounterBasedDropout of Cadre");
  });
}

// The program itself sends messages between neighbours of the ring, with arbitrary tags. Ring
// attention must not receive them.
TEST(ContextParallel, TheRingDoesNotTakeTheProgramsMessages) {
  torch::manual_seed(2);
  SelfAttention plain(SelfAttentionOptions{.embed_dim = 4, .num_heads = 2});
  const Tensor whole = torch::arange(2 * 6 * 4, torch::kFloat).view({2, 6, 4}).sin();
  const Tensor expected = plain(whole).detach();
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    SelfAttention layer(SelfAttentionOptions{.embed_dim = 4, .num_heads = 2});
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      layer->parameters()[i].set_data(plain->parameters()[i].detach().clone());
    }
    const ContextParallel context(group, {.num_tokens = 6});
    set_context_parallel(*layer, context);
    const int other = 1 - group.rank();
    const std::vector<int> tags = {0, 1, 2, 0x63700001, 0x63700002};
    std::vector<Work> sends;
    for (const int tag : tags) {
      sends.push_back(
          group.send_async(torch::full({48}, tag % 7, torch::kFloat), other, {.tag = tag}));
    }
    const Tensor output = layer(context.shard(whole, 1));
    require(torch::allclose(context.unshard(output, 1).detach(), expected, 1e-5, 1e-6), "values");
    output.sum().backward();
    for (const int tag : tags) {
      const Tensor received = torch::zeros({48});
      require(group.recv_from_any(received, {.tag = tag}) == other, "sender");
      require(torch::equal(received, torch::full({48}, tag % 7, torch::kFloat)), "message");
    }
    for (const Work& send : sends) send.wait();
  });
}

}  // namespace
}  // namespace cadre
