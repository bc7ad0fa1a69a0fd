// What the functions with divided weights are to autograd, beside their values and gradients, which
// parallel_layers_test.cpp compares with one process.
#include "cadre/layers/parallel_linear.h"

#include <ATen/ops/_make_dual.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "cadre/group/process_group_test_ranks.h"
#include "cadre/wrap/wrap_test_support.h"

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

// As a program does that saves memory: torch::relu_(layer(x)).
TEST_P(ParallelLinearFunctions, TheOutputMayBeChangedInPlace) {
  expect_on_all([](const ProcessGroup& group) {
    const Tensor weight = torch::eye(3, torch::kDouble).requires_grad_(true);
    const Tensor x = torch::tensor({{{1.0, -2.0, 3.0}, {-1.0, 2.0, -3.0}}}, torch::kDouble);
    const Tensor input = x.clone().requires_grad_(true);
    Tensor output = GetParam()(input, weight, {}, group, {});
    const Tensor values = output.detach().clone();
    torch::relu_(output);
    require(torch::equal(output, values.relu()), "values");
    output.sum().backward();
    const Tensor passed = values.gt(0).to(torch::kDouble);
    // The gradient of the whole: the column-parallel function sums it over the ranks.
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

// On one rank, because libtorch has one level of tangents for the whole process.
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
