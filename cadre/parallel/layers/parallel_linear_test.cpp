// Tests how the column-parallel and row-parallel linear functions behave in autograd.
// parallel_layers_test.cpp compares their values and gradients with one process.
#include "cadre/parallel/layers/parallel_linear.h"

#include <ATen/ops/_make_dual.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/parallel/layers/linear.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::error_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

using LinearFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const ProcessGroup&,
                                  const ParallelLinearOptions&);

class ParallelLinearFunctions : public ::testing::TestWithParam<LinearFunction> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(2, body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};
INSTANTIATE_TEST_SUITE_P(Functions, ParallelLinearFunctions,
                         ::testing::Values(column_parallel_linear, row_parallel_linear),
                         [](const auto& given) {
                           return given.param == column_parallel_linear ? "Column" : "Row";
                         });

// A program may compute torch::relu_(layer(x)) in place to save memory. This must work although the
// output of at::linear is a view if there is a bias and the input has three dimensions.
TEST_P(ParallelLinearFunctions, TheOutputMayBeChangedInPlace) {
  expect_on_all([](const ProcessGroup& group) {
    const Tensor weight = torch::eye(3, torch::kDouble).requires_grad_(true);
    const Tensor x = torch::tensor({{{1.0, -2.0, 3.0}, {-1.0, 2.0, -3.0}}}, torch::kDouble);
    const Tensor input = x.clone().requires_grad_(true);
    const Tensor bias = torch::zeros({3}, torch::kDouble);
    Tensor output = GetParam()(input, weight, bias, group, {});
    const Tensor values = output.detach().clone();
    torch::relu_(output);
    require(torch::equal(output, values.relu()), "values");
    output.sum().backward();
    const Tensor passed = values.gt(0).to(torch::kDouble);
    // The gradient of the whole input: the column-parallel function sums it over the 2 ranks, so it
    // is twice as large.
    const double ranks = GetParam() == column_parallel_linear ? 2 : 1;
    require(torch::equal(input.grad(), passed * ranks), "gradient");
  });
}

TEST_P(ParallelLinearFunctions, RecordNothingWithoutGrad) {
  expect_on_all([](const ProcessGroup& group) {
    const Tensor weight = torch::ones({2, 2}).requires_grad_(true);
    const at::NoGradGuard no_grad;
    const Tensor output = GetParam()(torch::ones({1, 2}), weight, {}, group, {});
    require(!output.requires_grad() && !output.grad_fn(), "no graph");
  });
}

TEST_P(ParallelLinearFunctions, ASecondBackwardNeedsTheGraph) {
  expect_on_all([](const ProcessGroup& group) {
    const Tensor weight = torch::ones({2, 2}).requires_grad_(true);
    const Tensor loss = GetParam()(torch::ones({1, 2}), weight, {}, group, {}).sum();
    loss.backward();
    std::string message;
    try {
      loss.backward();
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
    require(message.find("backward through the graph a second time") != std::string::npos, message);
  });
}

// Applies a pair of layers twice, so that the input of the second application depends on the
// weights, too. combine(x, up, down) returns the output of one application.
template <typename Combine>
Tensor applied_twice(const Tensor& x, const Tensor& up, const Tensor& down,
                     const Combine& combine) {
  const Tensor once = x + combine(x, up, down);
  return once + combine(once, up, down);
}

TEST(ParallelLinear, SharedWeightsEqualOneProcessAlsoWithCreateGraph) {
  const auto filled = [](at::IntArrayRef sizes, double first) {
    return (torch::arange(c10::multiply_integers(sizes), torch::kDouble) + first).sin().view(sizes);
  };
  const auto alone = [&](const Tensor& x, const Tensor& up, const Tensor& down) {
    return torch::linear(torch::tanh(torch::linear(x, up)), down);
  };
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    const auto leaf = [](const Tensor& t) { return t.clone().requires_grad_(true); };
    const Tensor x = filled({3, 4}, 1), up = filled({6, 4}, 2), down = filled({4, 6}, 3);
    const std::vector<Tensor> whole = {leaf(x), leaf(up), leaf(down)};
    const int64_t first = 3 * group.rank();
    const std::vector<Tensor> parts = {leaf(x), leaf(up.narrow(0, first, 3)),
                                       leaf(down.narrow(1, first, 3))};
    const Tensor expected = applied_twice(whole[0], whole[1], whole[2], alone).square().sum();
    const Tensor actual =
        applied_twice(parts[0], parts[1], parts[2],
                      [&](const Tensor& t, const Tensor& u, const Tensor& d) {
                        return row_parallel_linear(
                            torch::tanh(column_parallel_linear(t, u, {}, group)), d, {}, group);
                      })
            .square()
            .sum();
    const auto of_whole = torch::autograd::grad({expected}, whole, {}, true, true);
    const auto second_of_whole = torch::autograd::grad({of_whole[0].square().sum()}, whole);
    const auto require_equal = [&](const std::vector<Tensor>& mine,
                                   const std::vector<Tensor>& theirs, const std::string& what) {
      require(torch::allclose(mine[0], theirs[0], 1e-11, 1e-13), what + " of the input");
      require(torch::allclose(mine[1], theirs[1].narrow(0, first, 3), 1e-11, 1e-13), what + " up");
      require(torch::allclose(mine[2], theirs[2].narrow(1, first, 3), 1e-11, 1e-13),
              what + " down");
    };
    for (const bool creates_graph : {false, true}) {
      const auto of_parts = torch::autograd::grad({actual}, parts, {}, true, creates_graph);
      require_equal(of_parts, of_whole, creates_graph ? "recorded gradient" : "gradient");
      if (!creates_graph) continue;
      require_equal(torch::autograd::grad({of_parts[0].square().sum()}, parts), second_of_whole,
                    "second gradient");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A layer in the style kSequence: each rank has a part of the tokens and the whole weight.
TEST(ParallelLinear, OnShardsOfTheSequenceTheGradientsAreThoseOfAllTokens) {
  for (const bool has_bias : {false, true}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const auto make = [has_bias] {
        Linear made(torch::nn::LinearOptions(3, 5).bias(has_bias));
        made->to(torch::kDouble);
        const torch::NoGradGuard no_grad;
        for (Tensor parameter : made->parameters()) {
          parameter.copy_(torch::linspace(-1, 2, parameter.numel()).view(parameter.sizes()));
        }
        return made;
      };
      Linear plain = make();
      Linear layer = make();
      layers::parallelize_new(*layer, {.group = group, .style = ParallelStyle::kSequence}, "l");
      const Tensor x = torch::linspace(-3, 1, 24, torch::kDouble).view({2, 4, 3});
      const Tensor mine = x.narrow(1, 2 * group.rank(), 2).clone().requires_grad_(true);
      const Tensor whole = x.clone().requires_grad_(true);
      const Tensor expected = plain(whole);
      expected.pow(2).sum().backward();
      const Tensor output = layer(mine);
      output.pow(2).sum().backward();
      const auto require_close = [](const Tensor& actual, const Tensor& wanted,
                                    const std::string& what) {
        require(torch::allclose(actual, wanted, 1e-12, 1e-14), what);
      };
      require_close(output, expected.narrow(1, 2 * group.rank(), 2), "output");
      require_close(mine.grad(), whole.grad().narrow(1, 2 * group.rank(), 2), "input");
      require_close(layer->weight.grad(), plain->weight.grad(), "weight");
      if (has_bias) require_close(layer->bias.grad(), plain->bias.grad(), "bias");
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// This test uses one rank, because libtorch has one level of forward-mode differentiation for each
// process, and ranks are threads.
TEST_P(ParallelLinearFunctions, RefuseForwardModeDifferentiation) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
    const Tensor ones = torch::ones({2, 2});
    const Tensor dual = at::_make_dual(ones, ones, static_cast<int64_t>(level));
    const std::string message =
        error_of([&] { GetParam()(ones, dual, {}, group, {}); }, ErrorCode::kInvalidArgument);
    torch::autograd::ForwardADLevel::release_idx(level);
    require(message.find("the weight carries a tangent") != std::string::npos, message);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
