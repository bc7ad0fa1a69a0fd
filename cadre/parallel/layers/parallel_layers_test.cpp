// Compares each layer that is divided among ranks, and the loss, with the layer of torch::nn in one
// process: the output, the gradients of the input and of the parameters, and gradients of
// gradients. The numbers of features and classes are not divisible by the number of ranks, so a
// rank may have fewer of them than others, or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/parallel_linear.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// Returns smooth values about as large as initial weights.
Tensor filled(at::IntArrayRef shape, double seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (torch::arange(count, torch::kDouble) * 0.7 + seed).sin().view(shape) * 0.5;
}

Tensor part(const Tensor& whole, int64_t dim, const ProcessGroup& group) {
  const Chunk chunk = chunk_of(whole.size(dim), group.world_size(), group.rank());
  return whole.narrow(dim, chunk.begin, chunk.size);
}

void require_close(const Tensor& actual, const Tensor& expected, const std::string& what) {
  require(actual.defined() && actual.sizes() == expected.sizes() &&
              torch::allclose(actual, expected, 1e-11, 1e-13),
          what);
}

// The output of a layer; the first-order gradients of the leaves, for a weighted sum of the output;
// and the second-order gradients, which need the backward of a backward.
struct Derivatives {
  Tensor output;
  Tensors first;
  Tensors second;
};

// Returns the derivatives of this rank's part of the output. `weights` are the gradients of the
// output. `penalty` computes from the first-order gradients the number that is differentiated
// again; where gradients are divided, it is summed over the ranks.
Derivatives derivatives_of(const Tensor& output, const Tensor& weights, const Tensors& leaves,
                           const std::function<Tensor(const Tensors&)>& penalty) {
  Derivatives result{.output = output.detach(), .first = {}, .second = {}};
  // The first call runs the hand-written backward. The second one, with create_graph, makes
  // autograd differentiate a composition of differentiable operations instead.
  result.first = torch::autograd::grad({output}, leaves, {weights}, /*retain_graph=*/true);
  const Tensors recorded =
      torch::autograd::grad({output}, leaves, {weights}, true, /*create_graph=*/true);
  for (size_t i = 0; i < recorded.size(); ++i) {
    require_close(recorded[i].detach(), result.first[i], "recorded " + std::to_string(i));
  }
  result.second = torch::autograd::grad({penalty(recorded)}, leaves, {}, {}, false,
                                        /*allow_unused=*/true);
  return result;
}

class ParallelLayers : public ::testing::TestWithParam<int> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(GetParam(), body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, ParallelLayers, ::testing::Values(1, 2, 3, 4));

struct LinearProblem {
  Tensor x = filled({2, 12, 7}, 1);
  Tensor weight = filled({5, 7}, 2);
  Tensor bias = filled({5}, 3);
  Tensor weights = filled({2, 12, 5}, 4);  // gradients of the output
};

// Returns the sum of the squares of all three gradients.
Tensor sum_of_squares(const Tensors& gradients) {
  return gradients[0].pow(2).sum() + gradients[1].pow(2).sum() + gradients[2].pow(2).sum();
}

Derivatives linear_alone(const LinearProblem& problem) {
  const Tensors leaves = {problem.x.clone().requires_grad_(true),
                          problem.weight.clone().requires_grad_(true),
                          problem.bias.clone().requires_grad_(true)};
  return derivatives_of(torch::linear(leaves[0], leaves[1], leaves[2]), problem.weights, leaves,
                        sum_of_squares);
}

TEST_P(ParallelLayers, ColumnParallelLinearEqualsOneProcess) {
  const LinearProblem problem;
  const Derivatives alone = linear_alone(problem);
  for (const bool is_sequence : {false, true}) {
    expect_on_all([&](const ProcessGroup& group) {
      const auto shard = [&](const Tensor& x) { return is_sequence ? part(x, 1, group) : x; };
      const Tensors leaves = {shard(problem.x).clone().requires_grad_(true),
                              part(problem.weight, 0, group).clone().requires_grad_(true),
                              part(problem.bias, 0, group).clone().requires_grad_(true)};
      const Derivatives mine = derivatives_of(
          column_parallel_linear(leaves[0], leaves[1], leaves[2], group,
                                 {.sequence_parallel = is_sequence}),
          part(problem.weights, 2, group), leaves, [&](const Tensors& gradients) {
            const Tensor divided = gradients[1].pow(2).sum() + gradients[2].pow(2).sum();
            const Tensor of_input = gradients[0].pow(2).sum();
            if (!is_sequence) return of_input + functional::reduce_from_group(divided, group);
            return functional::reduce_from_group(of_input + divided, group);
          });
      require_close(mine.output, part(alone.output, 2, group), "output");
      require_close(mine.first[0], shard(alone.first[0]), "input");
      require_close(mine.first[1], part(alone.first[1], 0, group), "weight");
      require_close(mine.first[2], part(alone.first[2], 0, group), "bias");
      require_close(mine.second[0], shard(alone.second[0]), "second input");
      require_close(mine.second[1], part(alone.second[1], 0, group), "second weight");
    });
  }
}

TEST_P(ParallelLayers, RowParallelLinearEqualsOneProcess) {
  const LinearProblem problem;
  const Derivatives alone = linear_alone(problem);
  for (const bool is_sequence : {false, true}) {
    expect_on_all([&](const ProcessGroup& group) {
      const auto shard = [&](const Tensor& x) { return is_sequence ? part(x, 1, group) : x; };
      const Tensors leaves = {part(problem.x, 2, group).clone().requires_grad_(true),
                              part(problem.weight, 1, group).clone().requires_grad_(true),
                              problem.bias.clone().requires_grad_(true)};
      const Derivatives mine = derivatives_of(
          row_parallel_linear(leaves[0], leaves[1], leaves[2], group,
                              {.sequence_parallel = is_sequence}),
          shard(problem.weights), leaves, [&](const Tensors& gradients) {
            const Tensor divided = gradients[0].pow(2).sum() + gradients[1].pow(2).sum();
            return functional::reduce_from_group(divided, group) + gradients[2].pow(2).sum();
          });
      require_close(mine.output, shard(alone.output), "output");
      require_close(mine.first[0], part(alone.first[0], 2, group), "input");
      require_close(mine.first[1], part(alone.first[1], 1, group), "weight");
      require_close(mine.first[2], alone.first[2], "bias");
      require_close(mine.second[0], part(alone.second[0], 2, group), "second input");
      require_close(mine.second[1], part(alone.second[1], 1, group), "second weight");
    });
  }
}

// If only the weight or only the input requires a gradient, the ranks must still run the same
// collectives.
TEST_P(ParallelLayers, LinearWithFrozenPartsEqualsOneProcess) {
  const LinearProblem problem;
  const Derivatives alone = linear_alone(problem);
  expect_on_all([&](const ProcessGroup& group) {
    const Tensor weight = part(problem.weight, 0, group).clone().requires_grad_(true);
    const Tensor y = column_parallel_linear(problem.x, weight, {}, group);
    require_close(torch::autograd::grad({y}, {weight}, {part(problem.weights, 2, group)})[0],
                  part(alone.first[1], 0, group), "weight");
    const Tensor x = problem.x.clone().requires_grad_(true);
    const Tensor z = column_parallel_linear(x, weight.detach(), {}, group);
    require_close(torch::autograd::grad({z}, {x}, {part(problem.weights, 2, group)})[0],
                  alone.first[0], "input");
  });
}

TEST_P(ParallelLayers, AutocastComputesInItsDtype) {
  const LinearProblem problem;
  expect_on_all([&](const ProcessGroup& group) {
    const Tensor weight =
        part(problem.weight, 0, group).to(torch::kFloat).clone().requires_grad_(true);
    const Tensor x = problem.x.to(torch::kFloat).requires_grad_(true);
    Tensor y;
    {
      const Autocast autocast(torch::kBFloat16);
      y = column_parallel_linear(x, weight, {}, group);
    }
    require(y.scalar_type() == torch::kBFloat16, "bfloat16");
    y.sum().backward();
    require(x.grad().scalar_type() == torch::kFloat, "gradient float32");
    require(weight.grad().sizes() == weight.sizes(), "gradient of the weight");
  });
}

// All ranks compute the same loss from rows of a table of 11 entries. The row padding_idx gets no
// gradient.
TEST_P(ParallelLayers, EmbeddingEqualsOneProcess) {
  const Tensor indices = torch::arange(24).remainder(11).view({2, 12});
  const Tensor weights = filled({2, 12, 6}, 2);
  const auto options = torch::nn::EmbeddingOptions(11, 6).padding_idx(9);
  torch::nn::Embedding plain(options);
  plain->to(torch::kDouble);
  const Tensor expected = plain(indices);
  (expected * weights).sum().backward();
  for (const bool is_sequence : {false, true}) {
    std::vector<std::shared_ptr<EmbeddingImpl>> layers;
    for (int rank = 0; rank < GetParam(); ++rank) {
      layers.push_back(std::make_shared<EmbeddingImpl>(options));
      layers.back()->to(torch::kDouble);
      layers.back()->weight.set_data(plain->weight.detach().clone());
    }
    expect_on_all([&](const ProcessGroup& group) {
      // This rank's layer must be destroyed before the os::System of its group.
      const auto owned = std::move(layers[static_cast<size_t>(group.rank())]);
      EmbeddingImpl& layer = *owned;
      layers::parallelize_new(
          layer,
          {.group = group, .style = ParallelStyle::kRowwise, .sequence_parallel = is_sequence},
          "table");
      const auto shard = [&](const Tensor& x) {
        return is_sequence && group.world_size() > 1 ? part(x, 1, group) : x;
      };
      const Tensor output = layer.forward(indices);
      require_close(output.detach(), shard(expected.detach()), "output");
      (output * shard(weights)).sum().backward();
      require_close(layer.weight.grad(), part(plain->weight.grad(), 0, group), "weight");
      if (group.world_size() > 1) {
        require(error_of([&] { layer.forward(indices + 1); }, ErrorCode::kInvalidArgument)
                        .find("reach from 1 to 11, but the vocabulary has 11 entries") !=
                    std::string::npos,
                "an index outside");
      }
    });
  }
}

TEST_P(ParallelLayers, CrossEntropyEqualsOneProcess) {
  const Tensor logits = filled({2, 6, 11}, 1) * 20;
  const Tensor targets = torch::arange(12).remainder(11).view({2, 6}).masked_fill(
      torch::arange(12).view({2, 6}) == 4, -100);
  const auto alone_of = [&](const Tensor& leaf) {
    return torch::nn::functional::cross_entropy(leaf.reshape({-1, 11}), targets.reshape({-1}));
  };
  const auto penalty = [](const Tensors& gradients) { return gradients[0].pow(2).sum() * 100; };
  const Tensor whole = logits.clone().requires_grad_(true);
  const Tensor weight = torch::tensor(1.5, torch::kDouble);
  const Derivatives alone = derivatives_of(alone_of(whole), weight, {whole}, penalty);
  expect_on_all([&](const ProcessGroup& group) {
    const Tensor leaf = part(logits, 2, group).clone().requires_grad_(true);
    const Tensor loss = vocab_parallel_cross_entropy(leaf, targets, group, {.vocabulary = 11});
    const Derivatives mine = derivatives_of(loss, weight, {leaf}, [&](const Tensors& gradients) {
      return functional::reduce_from_group(penalty(gradients), group);
    });
    require_close(mine.output, alone.output, "loss");
    require_close(mine.first[0], part(alone.first[0], 2, group), "gradient");
    require_close(mine.second[0], part(alone.second[0], 2, group), "second gradient");
    // First, logits whose exponentials overflow in the dtype. Then, targets that the loss ignores
    // for all tokens.
    const Tensor large =
        vocab_parallel_cross_entropy(leaf.detach() * 1e4, targets, group, {.vocabulary = 11});
    require_close(large, alone_of(logits * 1e4), "large logits");
    const Tensor none = vocab_parallel_cross_entropy(leaf.detach(), torch::full_like(targets, -100),
                                                     group, {.vocabulary = 11});
    require(none.isnan().item<bool>(), "the mean over no tokens must be NaN");
    const Tensor leaf_of_sum = part(logits, 2, group).clone().requires_grad_(true);
    const auto sum_of = [&](const Tensor& some_targets) {
      return vocab_parallel_cross_entropy(leaf_of_sum, some_targets, group,
                                          {.vocabulary = 11, .reduction = LossReduction::kSum});
    };
    // The loss ignores one of the 12 tokens, so the sum is 11 times the mean.
    const Derivatives sum =
        derivatives_of(sum_of(targets), weight / 11, {leaf_of_sum}, [&](const Tensors& gradients) {
          return functional::reduce_from_group(penalty(gradients), group);
        });
    require_close(sum.output, alone.output * 11, "sum");
    require_close(sum.first[0], part(alone.first[0], 2, group), "gradient of the sum");
    require_close(sum.second[0], part(alone.second[0], 2, group), "second gradient of the sum");
    const Tensor sum_of_none = sum_of(torch::full_like(targets, -100));
    require(sum_of_none.item<double>() == 0, "sum of no token");
    require(torch::autograd::grad({sum_of_none}, {leaf_of_sum})[0].eq(0).all().item<bool>(),
            "gradient of the sum of no token");
    require(error_of(
                [&] { vocab_parallel_cross_entropy(leaf, targets + 1, group, {.vocabulary = 11}); },
                ErrorCode::kInvalidArgument)
                    .find("the target -99 is none of the 11 classes") != std::string::npos,
            "a target outside");
  });
}

TEST_P(ParallelLayers, AttentionEqualsOneProcess) {
  const Tensor x = filled({2, 12, 24}, 1) * 4;
  const Tensor weights = filled({2, 12, 24}, 2);
  const SelfAttentionOptions options{.embed_dim = 24, .num_heads = 24, .num_key_value_heads = 12};
  torch::manual_seed(3);
  SelfAttention plain(options);
  plain->to(torch::kDouble);
  const Tensor input = x.clone().requires_grad_(true);
  const Tensor expected = plain(input);
  (expected * weights).sum().backward();
  // Computes attention by its definition, head by head, for comparison.
  {
    const torch::NoGradGuard no_grad;
    const Tensor heads = plain->qkv(x).view({2, 12, 12, 4, 1});
    Tensors results;
    for (int64_t head = 0; head < 24; ++head) {
      const auto of = [&](int64_t index) { return heads.select(2, head / 2).select(2, index); };
      const Tensor scores = of(head % 2)
                                .matmul(of(2).transpose(1, 2))
                                .masked_fill(torch::ones({12, 12}, torch::kBool).triu(1), -1e300);
      results.push_back(scores.softmax(-1).matmul(of(3)));
    }
    EXPECT_TRUE(torch::allclose(plain->output(torch::cat(results, -1)), expected, 1e-11, 1e-13));
  }
  std::vector<std::shared_ptr<SelfAttentionImpl>> layers;
  for (int rank = 0; rank < GetParam(); ++rank) {
    torch::manual_seed(3);
    layers.push_back(std::make_shared<SelfAttentionImpl>(options));
    layers.back()->to(torch::kDouble);
  }
  expect_on_all([&](const ProcessGroup& group) {
    const auto owned = std::move(layers[static_cast<size_t>(group.rank())]);
    SelfAttentionImpl& layer = *owned;
    layers::parallelize_new(*layer.qkv, {.group = group, .style = ParallelStyle::kColwise}, "qkv");
    layers::parallelize_new(*layer.output, {.group = group, .style = ParallelStyle::kRowwise},
                            "output");
    const Tensor leaf = x.clone().requires_grad_(true);
    const Tensor output = layer.forward(leaf);
    (output * weights).sum().backward();
    require_close(output.detach(), expected.detach(), "output");
    require_close(leaf.grad(), input.grad(), "input");
    require_close(layer.qkv->weight.grad(), part(plain->qkv->weight.grad(), 0, group), "qkv");
    require_close(layer.output->weight.grad(), part(plain->output->weight.grad(), 1, group),
                  "output weight");
    require_close(layer.output->bias.grad(), plain->output->bias.grad(), "output bias");
  });
}

// A constructor with a group gives each rank its part of the values that rank 0 has drawn.
TEST_P(ParallelLayers, MegatronsLayersComputeWithOneWeight) {
  std::vector<Tensors> weights(static_cast<size_t>(GetParam()));
  std::vector<Tensors> results(weights.size());
  const Tensor x = filled({3, 7}, 1).to(torch::kFloat);
  const Tensor indices = torch::tensor({0, 5, 10});
  expect_on_all([&](const ProcessGroup& group) {
    ColumnParallelLinear column(torch::nn::LinearOptions(7, 5), group,
                                ColumnParallelOptions{.gather_output = true});
    RowParallelLinear row(torch::nn::LinearOptions(7, 5), group,
                          RowParallelOptions{.input_is_parallel = false});
    VocabParallelEmbedding table(torch::nn::EmbeddingOptions(11, 6), group);
    ParallelSelfAttention attention(SelfAttentionOptions{.embed_dim = 24, .num_heads = 12}, group);
    weights[group.rank()] = {column->weight, column->bias, row->weight, row->bias, table->weight};
    results[group.rank()] = {column(x).detach(), row(x).detach(), table(indices).detach()};
    require(attention(filled({1, 2, 24}, 1).to(torch::kFloat)).size(2) == 24, "attention");
  });
  if (HasFailure()) return;
  const auto whole = [&](size_t index, int64_t dim) {
    Tensors parts;
    for (const Tensors& rank : weights) parts.push_back(rank[index].detach());
    return torch::cat(parts, dim);
  };
  const Tensors expected = {torch::linear(x, whole(0, 0), whole(1, 0)),
                            torch::linear(x, whole(2, 1), weights[0][3].detach()),
                            whole(4, 0).index_select(0, indices)};
  EXPECT_EQ(whole(0, 0).sizes(), torch::IntArrayRef({5, 7}));
  for (const Tensors& rank : results) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::allclose(rank[i], expected[i], 1e-5, 1e-6)) << i;
    }
  }
}

TEST(ParallelLayersErrors, NameWhatTheRanksDoNotDivide) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto refused = [](const auto& call, const std::string& sentence) {
      const std::string message = error_of(call, ErrorCode::kInvalidArgument);
      require(message.find(sentence) != std::string::npos, message);
    };
    refused(
        [&] {
          ParallelSelfAttention(
              SelfAttentionOptions{.embed_dim = 24, .num_heads = 6, .num_key_value_heads = 3},
              group);
        },
        "\"ParallelSelfAttention.qkv\" cannot be kColwise on the 2 ranks of group \"world\": its "
        "48 features are 3 blocks (attention heads) of 16, which cannot be divided evenly among 2 "
        "ranks; use a "
        "group whose number of ranks divides the number of blocks");
    refused([&] { SelfAttention(SelfAttentionOptions{.embed_dim = 24, .num_heads = 5}); },
            "SelfAttention: embed_dim 24 must be a multiple of num_heads 5, and that a multiple of "
            "num_key_value_heads 5");
    ColumnParallelLinear column(torch::nn::LinearOptions(8, 6), group,
                                ColumnParallelOptions{.sequence_parallel = true});
    RowParallelLinear row(torch::nn::LinearOptions(6, 8), group,
                          RowParallelOptions{.sequence_parallel = true});
    refused(
        [&] {
          row(torch::ones({3, 5, 3}));
        },
        format(
            "sequence parallelism on rank {} of group \"world\": the sequence is dimension -2 of "
            "(..., T, D), and 2 ranks do not divide T of the sizes (3, 5, 8); pad the sequence",
            group.rank()));
    refused(
        [&] {
          column(torch::ones({3, 5, 4}));
        },
        "\"ColumnParallelLinear\", which is kColwise on rank");
    refused([&] { column->clone(); }, "clone the module before it is parallelized");
    refused([&] { VocabParallelEmbedding(torch::nn::EmbeddingOptions(8, 6).max_norm(1), group); },
            "max_norm, scale_grad_by_freq or sparse");
    Embedding positions(6, 4);
    layers::parallelize_new(*positions, {.group = group, .style = ParallelStyle::kSequence}, "p");
    // An index outside of the vocabulary is only in rank 1's shard of the positions, but all ranks
    // must throw.
    refused([&] { positions(torch::arange(8)); }, "reach from 0 to 7, but the vocabulary has 6");
    refused(
        [&] {
          vocab_parallel_cross_entropy(torch::ones({3, 3}), torch::zeros({3}, torch::kLong), group,
                                       {.vocabulary = 9});
        },
        "logits of the sizes (3, 3) are not this rank's");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Returns the time of one call in microseconds: the mean over kCalls calls, measured several times,
// of which the smallest mean is taken.
double microseconds_of(const std::function<void()>& call) {
  constexpr int kCalls = 200;
  double best = 1e9;
  for (int round = 0; round < 10; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count() / kCalls);
  }
  return best;
}

// Prints the time that a column-parallel and a row-parallel layer need in addition to their matrix
// products and collectives. Four operations are timed together: forward and backward of each layer.
TEST(ParallelLayersTime, OfAnOperationBesideProductsAndCollectives) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const Tensor x = torch::rand({8, 16}).requires_grad_(true);
    const Tensor up = torch::rand({16, 16}).requires_grad_(true);
    const Tensor down = torch::rand({16, 16}).requires_grad_(true);
    const Tensor gradient = torch::rand({8, 16});
    const double parallel = microseconds_of([&] {
      const Tensor h = column_parallel_linear(x, up, {}, group);
      torch::autograd::grad({row_parallel_linear(h, down, {}, group)}, {x, up, down}, {gradient});
    });
    const double plain = microseconds_of([&] {
      const Tensor h = torch::linear(x, up);
      torch::autograd::grad({torch::linear(h, down)}, {x, up, down}, {gradient});
    });
    const at::NoGradGuard no_grad;
    const Tensor sum = torch::rand({8, 16});
    const double raw = microseconds_of([&] {
      const Tensor h = torch::linear(x, up);
      const Tensor y = torch::linear(h, down);
      const Tensor dh = gradient.mm(down);
      static_cast<void>(gradient.t().mm(h));
      static_cast<void>(dh.mm(up));
      static_cast<void>(dh.t().mm(x));
      group.all_reduce(sum);
      group.all_reduce_async(sum).wait();
    });
    std::cout << "column and row, forward and backward: " << parallel << " us, plain layers "
              << plain << " us, products and collectives alone " << raw
              << " us: " << (parallel - raw) / 4 << " us an operation\n";
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PlainLayers, AreThoseOfLibtorchAndCanBeCopied) {
  torch::manual_seed(1);
  torch::nn::Linear expected(4, 3);
  torch::manual_seed(1);
  Linear layer(4, 3);
  EXPECT_TRUE(torch::equal(layer->weight, expected->weight));
  EXPECT_TRUE(torch::equal(layer->bias, expected->bias));
  const Tensor x = torch::ones({2, 4});
  EXPECT_TRUE(torch::equal(layer(x), expected(x)));
  const auto copy = std::dynamic_pointer_cast<LinearImpl>(layer->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(torch::equal(copy->weight, expected->weight));
  EXPECT_FALSE(copy->weight.is_same(layer->weight));
  torch::nn::Sequential sequence(Linear(4, 3), LayerNorm(torch::nn::LayerNormOptions({3})));
  EXPECT_EQ(sequence->forward(x).sizes(), torch::IntArrayRef({2, 3}));
}

}  // namespace
}  // namespace cadre
