// Which tokens of a sequence each rank has, the way there and back, the loss and the sum of
// gradients over the tokens of all ranks, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/group/process_group_test_ranks.h"
#include "cadre/layers/attention/context_parallel.h"
#include "cadre/layers/counter_based_dropout.h"
#include "cadre/layers/self_attention.h"
#include "cadre/wrap/wrap_test_support.h"

namespace cadre {
namespace {

using testing::error_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr SequenceOrder kBothOrders[] = {SequenceOrder::kContiguous, SequenceOrder::kZigzag};

void expect_on(int num_ranks, const std::function<void(const ProcessGroup&)>& body) {
  const auto result = run_groups(num_ranks, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

void require_refused(const std::function<void()>& call, const std::string& sentence) {
  const std::string message = error_of(call, ErrorCode::kInvalidArgument);
  require(message.find(sentence) != std::string::npos, message);
}

// Written out: 2 ranks have chunks 0, 3 and 1, 2 of 4.
TEST(ContextParallel, ZigzagPairsTheFirstChunkWithTheLast) {
  expect_on(2, [](const ProcessGroup& group) {
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
    // Chunks of ceil(7 / 4) = 2: the last has one token. Neighbouring chunks count as one run of
    // positions, in ascending order.
    require(positions_of(7, SequenceOrder::kZigzag) ==
                (is_first ? Numbers{0, 1, 6} : Numbers{2, 3, 4, 5}),
            "7 tokens");
    require(positions_of(1, SequenceOrder::kZigzag) == (is_first ? Numbers{0} : Numbers{}),
            "1 token");
  });
}

TEST(ContextParallel, UnshardIsTheReverseOfShardAlsoForGradients) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on(num_ranks, [](const ProcessGroup& group) {
      for (const SequenceOrder order : kBothOrders) {
        for (const int64_t num_tokens : {1, 5, 8, 24}) {
          const ContextParallel context(group, {.num_tokens = num_tokens, .order = order});
          const Tensor whole =
              torch::arange(2 * num_tokens * 3, torch::kDouble).sin().view({2, num_tokens, 3});
          const Tensor leaf = context.shard(whole, -2).requires_grad_(true);
          const Tensor again = context.unshard(leaf, 1);
          require(torch::equal(again.detach(), whole), "values");
          // Every rank's loss is the same sum, so the gradient is world_size times that of one.
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

// A sum over unequal numbers of tokens, of which some do not count, is not a mean of means.
TEST(ContextParallel, TheLossIsTheMeanOverTheTokensOfAllRanks) {
  const Tensor x = torch::arange(11, torch::kDouble).sin();
  const Tensor counts = torch::arange(11).remainder(3).ne(0);
  const Tensor w = torch::tensor(0.7, torch::kDouble).requires_grad_(true);
  const Tensor expected = (x * w).square().masked_select(counts).mean();
  expected.backward();
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on(num_ranks, [&](const ProcessGroup& group) {
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

// The rows of a token have the mask that they have in one process.
TEST(ContextParallel, DropoutOfActivationsIsThatOfOneProcess) {
  const auto stream = std::make_shared<DropoutStream>(DropoutStream{.seed = 3});
  const CounterBasedDropoutOptions options{.p = 0.4, .layer = 2, .stream = stream};
  const Tensor x = torch::ones({2, 13, 7});
  const Tensor expected = CounterBasedDropout(options)(x);
  for (const int num_ranks : {1, 2, 3, 4}) {
    expect_on(num_ranks, [&](const ProcessGroup& group) {
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
  expect_on(2, [](const ProcessGroup& group) {
    const SequenceOrder order =
        group.rank() == 0 ? SequenceOrder::kZigzag : SequenceOrder::kContiguous;
    require_refused(
        [&] { ContextParallel(group, {.num_tokens = 8, .order = order}); },
        "rank 0 has the options {num_tokens 8, kRing, kZigzag} and rank 1 has {num_tokens 8, "
        "kRing, kContiguous}; pass the same on all ranks");
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
    sparse.mutable_grad() = torch::ones({3}).to_sparse();
    require_refused([&] { context.sum_gradients({sparse}); },
                    "the gradient of a parameter of the sizes (3) is not dense");
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
    require_refused(
        [&] {
          dropout(torch::ones({2, 8, 4}));
        },
        "is not (B, ..., T, D) with this rank's 4 of 8 tokens");
  });
}

}  // namespace
}  // namespace cadre
