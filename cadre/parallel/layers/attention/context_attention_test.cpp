// Compares attention over a sequence that is divided among ranks, in every form (ring, all_to_all)
// and order (contiguous, zigzag), with the formula in float64 in one process: the output, and the
// gradients of query, key and value.
//
// Bounds, as fractions of the tensor's largest value. float64: 1e-12. A result is a sum of about 30
// products and 30 weights, each with a few roundings of 2^-53, and the largest value is about as
// large as its terms. float32: 1e-5, by the same argument with 2^-24. bfloat16: 2^-6. The inputs
// equal those of the reference, sums are in float32, and the output and the gradients are rounded
// to 8 bits; the backward uses the rounded output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/layers/attention/context_parallel_attention.h"
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

constexpr ContextForm kForms[] = {ContextForm::kRing, ContextForm::kAllToAll};
constexpr SequenceOrder kOrders[] = {SequenceOrder::kContiguous, SequenceOrder::kZigzag};

// Returns numbers between -1 and 1 in an irregular sequence.
Tensor irregular(at::IntArrayRef shape, double seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (torch::arange(count, torch::kDouble).square() * 0.37 + seed).sin().view(shape);
}

struct Problem {
  int64_t num_tokens = 12;
  int64_t num_heads = 12;
  int64_t num_key_value_heads = 12;
  int64_t head_dim = 5;
  int64_t value_dim = 5;
  bool is_causal = true;
  torch::ScalarType dtype = torch::kDouble;
  std::optional<double> scale = {};
  std::optional<CounterBasedDropoutOptions> dropout = {};

  // Returns query, key, value, and the weights of the outputs in the loss. All are rounded to the
  // problem's dtype and returned as float64.
  Tensors tensors() const {
    return {rounded({2, num_heads, num_tokens, head_dim}, 1),
            rounded({2, num_key_value_heads, num_tokens, head_dim}, 2),
            rounded({2, num_key_value_heads, num_tokens, value_dim}, 3),
            rounded({2, num_heads, num_tokens, value_dim}, 4)};
  }
  double bound() const {
    if (dtype == torch::kBFloat16) return 0x1p-6;
    return dtype == torch::kFloat ? 1e-5 : 1e-12;
  }
  AttentionOptions options() const {
    return {.is_causal = is_causal, .scale = scale, .dropout = dropout};
  }
  std::string text() const {
    return std::to_string(num_tokens) + " tokens, " + std::to_string(num_heads) + " and " +
           std::to_string(num_key_value_heads) + " heads" + (is_causal ? ", causal" : "");
  }

 private:
  Tensor rounded(at::IntArrayRef shape, double seed) const {
    return irregular(shape, seed).to(dtype).to(torch::kDouble);
  }
};

// Returns the expected output, and the expected gradients of query, key and value.
Tensors by_formula(const Problem& problem, const Tensors& tensors) {
  const auto leaf = [&](size_t i) { return tensors[i].clone().requires_grad_(true); };
  const Tensors leaves = {leaf(0), leaf(1), leaf(2)};
  const auto repeated = [&](const Tensor& heads) {
    return heads.repeat_interleave(problem.num_heads / problem.num_key_value_heads, 1);
  };
  const double scale = problem.scale.value_or(std::pow(problem.head_dim, -0.5));
  Tensor scores = leaves[0].matmul(repeated(leaves[1]).transpose(2, 3)) * scale;
  if (problem.is_causal) {
    const Tensor future =
        torch::ones({problem.num_tokens, problem.num_tokens}).triu(1).to(torch::kBool);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  Tensor weights = scores.softmax(-1);
  if (problem.dropout) {
    weights = counter_based_dropout(weights, problem.dropout->p, *problem.dropout->stream,
                                    problem.dropout->layer);
  }
  const Tensor output = weights.matmul(repeated(leaves[2]));
  Tensors results = torch::autograd::grad({(output * tensors[3]).sum()}, leaves);
  results.insert(results.begin(), output.detach());
  return results;
}

// Computes with the tokens of this rank. Returns this rank's part of the output and of the
// gradients.
Tensors on_ranks(const Problem& problem, const Tensors& tensors, const ContextParallel& context) {
  const auto leaf = [&](size_t i) {
    return context.shard(tensors[i], 2).to(problem.dtype).requires_grad_(true);
  };
  const Tensors leaves = {leaf(0), leaf(1), leaf(2)};
  Problem own = problem;
  std::shared_ptr<DropoutStream> stream;
  if (problem.dropout) {
    stream = std::make_shared<DropoutStream>(*problem.dropout->stream);
    own.dropout->stream = stream;
  }
  const Tensor output =
      context_parallel_attention(leaves[0], leaves[1], leaves[2], context, own.options());
  // The backward must drop the same weights as its forward, even if the program has changed the
  // stream's step in the meantime.
  if (stream) ++stream->step;
  Tensors results =
      torch::autograd::grad({output}, leaves, {context.shard(tensors[3], 2).to(problem.dtype)});
  results.insert(results.begin(), output.detach());
  return results;
}

void require_equal(const Problem& problem, const Tensors& expected, const Tensors& actual,
                   const ContextParallel& context, double bound) {
  constexpr const char* kNames[] = {"output", "query", "key", "value"};
  for (size_t i = 0; i < expected.size(); ++i) {
    const Tensor part = context.shard(expected[i], 2);
    const std::string what = std::string(kNames[i]) + " of " + problem.text() + ", " +
                             std::string(to_string(context.options().form)) + ", " +
                             std::string(to_string(context.options().order)) + " on " +
                             std::to_string(context.group().world_size()) + " ranks";
    require(actual[i].sizes() == part.sizes(), what);
    require(actual[i].scalar_type() == problem.dtype, what);
    const Tensor difference = (actual[i].to(torch::kDouble) - part).abs();
    if (part.numel() == 0) continue;
    const double allowed = bound * expected[i].abs().max().item<double>();
    // The comparison is false for NaN, so the test fails then, too.
    require(difference.max().item<double>() <= allowed,
            what + ": differs by " + std::to_string(difference.max().item<double>() / allowed) +
                " bounds");
  }
}

class ContextAttention : public ::testing::TestWithParam<int> {
 protected:
  // Checks the problems in both forms and both orders.
  void expect_formula(const std::vector<Problem>& problems) {
    std::vector<Tensors> tensors;
    for (const Problem& problem : problems) tensors.push_back(problem.tensors());
    expect_formula(problems, tensors, std::nullopt);
  }
  void expect_formula(const std::vector<Problem>& problems, const std::vector<Tensors>& tensors,
                      std::optional<double> bound) {
    std::vector<Tensors> expected;
    for (size_t i = 0; i < problems.size(); ++i) {
      expected.push_back(by_formula(problems[i], tensors[i]));
    }
    const auto result = run_groups(GetParam(), [&](const ProcessGroup& group) {
      for (size_t i = 0; i < problems.size(); ++i) {
        for (const ContextForm form : kForms) {
          for (const SequenceOrder order : kOrders) {
            const ContextParallel context(
                group, {.num_tokens = problems[i].num_tokens, .form = form, .order = order});
            require_equal(problems[i], expected[i], on_ranks(problems[i], tensors[i], context),
                          context, bound.value_or(problems[i].bound()));
          }
        }
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, ContextAttention, ::testing::Values(1, 2, 3, 4));

// Three numbers of tokens: one that is divisible by the ranks; one that is not; and one so small
// that chunks are empty. 5 tokens in 8 chunks leave three chunks empty, and 2 tokens on 4 ranks in
// contiguous order leave two ranks without tokens.
TEST_P(ContextAttention, EqualsTheFormulaForEveryNumberOfTokens) {
  std::vector<Problem> problems;
  for (const bool is_causal : {true, false}) {
    for (const int64_t num_tokens : {24, 13, 5, 2}) {
      problems.push_back({.num_tokens = num_tokens, .is_causal = is_causal});
    }
  }
  expect_formula(problems);
}

// The 12 query heads are divisible by 2, 3 and 4 ranks; some of the numbers of key and value heads
// are not.
TEST_P(ContextAttention, EqualsTheFormulaForGroupedQueriesAndOtherWidths) {
  std::vector<Problem> problems;
  for (const int64_t num_key_value_heads : {1, 2, 3, 6}) {
    problems.push_back({.num_key_value_heads = num_key_value_heads});
  }
  problems.push_back({.head_dim = 3, .value_dim = 7, .is_causal = false});
  problems.push_back({.head_dim = 3, .value_dim = 1, .scale = 0.9});
  expect_formula(problems);
}

TEST_P(ContextAttention, EqualsTheFormulaInLowerPrecision) {
  expect_formula({{.num_key_value_heads = 4, .dtype = torch::kFloat},
                  {.is_causal = false, .dtype = torch::kFloat},
                  {.num_key_value_heads = 4, .dtype = torch::kBFloat16},
                  {.is_causal = false, .dtype = torch::kBFloat16}});
}

// Two ranks with contiguous order have shards of 260 rows, more than the kTileRows that are
// computed at a time.
TEST_P(ContextAttention, EqualsTheFormulaForLongShards) {
  expect_formula({{.num_tokens = 520, .num_key_value_heads = 1, .head_dim = 2, .value_dim = 2}});
}

TEST_P(ContextAttention, DropsTheElementsThatOneProcessDrops) {
  const auto stream = std::make_shared<DropoutStream>(DropoutStream{.seed = 3, .first_sample = 4});
  const CounterBasedDropoutOptions dropout{.p = 0.3, .layer = 5, .stream = stream};
  expect_formula({{.num_key_value_heads = 4, .dropout = dropout},
                  {.num_tokens = 13, .is_causal = false, .dropout = dropout}});
}

// Scores are as large as 10^4, so their exponentials overflow. Pairs of keys are equal, so that
// weights are 1/2 and gradients are not zero. The absolute rounding error of a score becomes the
// relative error of its exponential: 10^4 roundings, times a few for each of the 5 products, in the
// result and in the reference.
TEST_P(ContextAttention, LargeScoresGiveTheFormula) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const Problem problem{.num_tokens = 24, .dtype = dtype, .scale = 4e3};
    Tensors tensors = problem.tensors();
    tensors[1] = tensors[1].narrow(2, 0, 12).repeat_interleave(2, 2);
    const Tensor scores = tensors[0].matmul(tensors[1].transpose(2, 3)) * *problem.scale;
    ASSERT_GT(scores.abs().max().item<double>(), 8e3);
    expect_formula({problem}, {tensors}, 40 * 1e4 * (dtype == torch::kDouble ? 0x1p-53 : 0x1p-24));
  }
}

// The keys of the second half of the tokens have scores of minus infinity in float32. So the
// queries of that half meet no key in the first block that they process, which is their own.
TEST_P(ContextAttention, ARowWithoutAnyKeyInABlockGivesTheFormula) {
  const Problem problem{.is_causal = false, .dtype = torch::kFloat};
  Tensors tensors = problem.tensors();
  tensors[0].select(3, 0).fill_(10);
  tensors[1].narrow(2, 6, 6).select(3, 0).fill_(-3e38);
  expect_formula({problem}, {tensors}, std::nullopt);
}

// The order of additions depends on the ranks only, and not on the order in which messages arrive,
// so two runs give equal bits.
TEST_P(ContextAttention, TwoRunsGiveEqualBits) {
  const Problem problem{.num_tokens = 13, .dtype = torch::kFloat};
  const Tensors tensors = problem.tensors();
  const auto result = run_groups(GetParam(), [&](const ProcessGroup& group) {
    const ContextParallel context(group, {.num_tokens = problem.num_tokens});
    const Tensors first = on_ranks(problem, tensors, context);
    const Tensors second = on_ranks(problem, tensors, context);
    for (size_t i = 0; i < first.size(); ++i) {
      require(torch::equal(first[i], second[i]), std::to_string(i));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ContextAttentionErrors, NameWhatDoesNotFit) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto refused = [](const auto& call, const std::string& sentence) {
      const std::string message = error_of(call, ErrorCode::kInvalidArgument);
      require(message.find(sentence) != std::string::npos, message);
    };
    const ContextParallel ring(group, {.num_tokens = 12});
    const Tensor x = torch::ones({2, 3, 6, 4}).requires_grad_(true);
    refused(
        [&] {
          context_parallel_attention(x, x, torch::ones({2, 3, 6}), ring);
        },
        "are not (B, H, T, D), (B, H_kv, T, D) and (B, H_kv, T, D_v)");
    refused([&] { context_parallel_attention(x, x, x.to(torch::kDouble), ring); },
            "value Double (2, 3, 6, 4) are not");
    const Tensor whole = torch::ones({2, 3, 12, 4});
    refused([&] { context_parallel_attention(whole, whole, whole, ring); },
            "do not have this rank's 6 of 12 tokens in dimension 2; divide the model's input with "
            "ContextParallel::shard()");
    refused(
        [&] {
          context_parallel_attention(x, x, x, ring,
                                     {.dropout = CounterBasedDropoutOptions{.layer = 1}});
        },
        "options.dropout->stream is null");
    refused(
        [&] {
          const Tensor output = context_parallel_attention(x, x, x, ring);
          torch::autograd::grad({output.sum()}, {x}, {}, true, /*create_graph=*/true);
        },
        "backward of ring attention: it has no second derivative");
    const ContextParallel exchange(group, {.num_tokens = 12, .form = ContextForm::kAllToAll});
    refused([&] { context_parallel_attention(x, x, x, exchange); },
            "kAllToAll gives each of 2 ranks the same number of query heads, so the number of "
            "ranks must divide the 3 heads; use ContextForm::kRing");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
