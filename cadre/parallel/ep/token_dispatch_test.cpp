// Tests the plan of one forward, with the expected numbers of a small example.
#include "cadre/parallel/ep/token_dispatch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::token_dispatch_test {
namespace {

using parallel::DispatchPlan;
using parallel::ExpertGroups;
using parallel::plan_dispatch;
using ::testing::ElementsAre;
using testing::require;

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const int64_t* const first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

// Returns the plan for three tokens that each select two of three experts, in one process.
DispatchPlan plan_of(std::optional<double> capacity_factor) {
  const at::Tensor experts = at::tensor({0, 1, 0, 2, 1, 0}, at::kLong).view({3, 2});
  return plan_dispatch(experts, {.num_experts = 3, .capacity_factor = capacity_factor}, nullptr);
}

TEST(TokenDispatch, OrdersChoicesByExpertThenByChoiceThenByToken) {
  const DispatchPlan plan = plan_of(std::nullopt);
  EXPECT_THAT(numbers(plan.tokens), ElementsAre(0, 1, 2, 2, 0, 1));
  EXPECT_THAT(numbers(plan.choices), ElementsAre(0, 2, 5, 4, 1, 3));
  EXPECT_THAT(plan.rows_of_expert, ElementsAre(3, 2, 1));
  EXPECT_THAT(numbers(plan.choices_of_expert), ElementsAre(3, 2, 1));
  EXPECT_EQ(plan.num_tokens, 3);
  EXPECT_EQ(plan.num_dropped, 0);
}

TEST(TokenDispatch, ACapacityDropsTheLastChoicesOfAnExpert) {
  // Six choices, three experts: the capacity is 2 with the factor 1.0, and 1 with the factor 0.4.
  const DispatchPlan two = plan_of(1.0);
  EXPECT_THAT(numbers(two.choices), ElementsAre(0, 2, 4, 1, 3));
  EXPECT_THAT(two.rows_of_expert, ElementsAre(2, 2, 1));
  EXPECT_THAT(numbers(two.choices_of_expert), ElementsAre(3, 2, 1)) << "dropped ones included";
  EXPECT_EQ(two.num_dropped, 1);
  const DispatchPlan one = plan_of(0.4);
  EXPECT_THAT(numbers(one.tokens), ElementsAre(0, 2, 1));
  EXPECT_EQ(one.num_dropped, 3);
  EXPECT_EQ(plan_of(1e300).num_dropped, 0);
}

TEST(TokenDispatch, WithoutATokenNothingIsProcessed) {
  const DispatchPlan plan = plan_dispatch(at::empty({0, 2}, at::kLong),
                                          {.num_experts = 3, .capacity_factor = 1}, nullptr);
  EXPECT_EQ(plan.tokens.numel(), 0);
  EXPECT_EQ(plan.num_tokens, 0);
  EXPECT_THAT(plan.rows_of_expert, ElementsAre(0, 0, 0));
}

// Two ranks have one expert each. Expert 0, on rank 0, is selected by one token of rank 0 and by
// two of rank 1. The capacity is 2, so the last of these three choices is dropped.
TEST(TokenDispatch, RowsGoToTheRankOfTheirExpertAndBack) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& group) {
    const bool is_first = group.rank() == 0;
    const ExpertGroups groups = {.tokens = group, .experts = group, .members = {0, 1}};
    const at::Tensor experts =
        is_first ? at::tensor({0, 1}, at::kLong) : at::tensor({0, 0}, at::kLong);
    const DispatchPlan plan =
        plan_dispatch(experts.view({2, 1}), {.num_experts = 2, .capacity_factor = 1}, &groups);
    using Numbers = std::vector<int64_t>;
    require(plan.sent == (is_first ? Numbers{1, 1} : Numbers{1, 0}), "sent");
    require(plan.received == (is_first ? Numbers{1, 1} : Numbers{1, 0}), "received");
    require(plan.rows_of_expert == (is_first ? Numbers{2} : Numbers{1}), "rows");
    require(plan.num_tokens == 4 && plan.num_dropped == 1, "counts of all ranks");

    const at::Tensor tokens =
        is_first ? at::tensor({10.0, 11.0}, at::kFloat) : at::tensor({20.0, 21.0}, at::kFloat);
    const at::Tensor rows = tokens.view({2, 1}).index_select(0, plan.tokens);
    const at::Tensor arrived = parallel::send_to_experts(rows, plan, &groups);
    const at::Tensor expected =
        is_first ? at::tensor({10.0, 20.0}, at::kFloat) : at::tensor({11.0}, at::kFloat);
    require(arrived.flatten().equal(expected), "rows of the expert");
    require(parallel::return_to_tokens(arrived, plan, &groups).equal(rows), "back");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::token_dispatch_test
