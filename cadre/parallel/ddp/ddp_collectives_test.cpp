// Tests models and losses with a differentiable collective, and with gradients weighted by samples.
// If the ranks have equal numbers of samples, gradients must be correct. Otherwise all ranks must
// throw, and what the error recommends must give correct gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::ddp_collectives {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr auto kDouble = torch::kDouble;

// A layer that adds the sum of the rows of all ranks to each row.
struct Summing : nn::Module {
  explicit Summing(const ProcessGroup& ranks) : group(ranks) {
    weight = register_parameter("weight", torch::ones({}, kDouble));
  }
  Tensor forward(const Tensor& x) {
    return x * weight + functional::all_reduce((x * weight).sum(), group);
  }
  ProcessGroup group;
  Tensor weight;
};

// Returns this rank's rows: 2 rows if is_equal, otherwise rank + 1 rows. The rows of all ranks are
// 1, 2, 3, ...
Tensor rows_of(const ProcessGroup& group, bool is_equal) {
  const int64_t rank = group.rank();
  const int64_t begin = is_equal ? 2 * rank : rank * (rank + 1) / 2;
  return torch::arange(begin + 1, begin + 1 + (is_equal ? 2 : rank + 1), kDouble);
}

// Returns the derivative by w of the mean over all rows x of x * w + w * sum(all rows).
double expected_gradient(int world_size, bool is_equal) {
  const int64_t num_rows = is_equal ? 2 * world_size : world_size * (world_size + 1) / 2;
  const Tensor x = torch::arange(1, num_rows + 1, kDouble);
  return (x.mean() + x.sum()).item<double>();
}

struct CollectiveCase {
  const char* name;
  bool is_accumulated;
};

class DdpCollectives : public ::testing::TestWithParam<CollectiveCase> {};

void run_backward(DistributedDataParallel<Summing>& model, const Tensor& loss,
                  bool is_accumulated) {
  if (!is_accumulated) return loss.backward();
  {
    const auto guard = model.no_sync();
    loss.backward();
  }
  model.reduce_gradients();
}

TEST_P(DdpCollectives, EqualSharesHaveTheGradientOfTheMean) {
  const auto result = run_groups(3, [&](const ProcessGroup& group, std::string&) {
    const ProcessGroup apart = *group.split({.color = 0, .name = "loss"});
    const auto net = std::make_shared<Summing>(apart);
    DistributedDataParallel model{net, group};
    run_backward(model, model(rows_of(group, true)).mean(), GetParam().is_accumulated);
    require(std::abs(net->weight.grad().item<double>() - expected_gradient(3, true)) < 1e-12,
            format("gradient {}", net->weight.grad().item<double>()));
    apart.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(DdpCollectives, UnequalSharesAreRefusedOnAllRanksAndTheRemedyIsRight) {
  const auto result = run_groups(3, [&](const ProcessGroup& group, std::string& output) {
    const ProcessGroup apart = *group.split({.color = 0, .name = "loss"});
    const auto net = std::make_shared<Summing>(apart);
    const Tensor x = rows_of(group, false);
    {
      DistributedDataParallel model{net, group};
      output = failure_of([&] { run_backward(model, model(x).mean(), GetParam().is_accumulated); });
    }
    net->zero_grad();
    DistributedDataParallel model{net, group, {.weighting = GradientWeighting::kEqual}};
    run_backward(model, model(x).sum() * 3 / 6, GetParam().is_accumulated);
    require(std::abs(net->weight.grad().item<double>() - expected_gradient(3, false)) < 1e-12,
            format("gradient {}", net->weight.grad().item<double>()));
    apart.close();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("a collective of cadre::functional ran in this backward() "
                                       "on all ranks, and the ranks have unequal numbers of "
                                       "samples (1 on rank 0, 2 on rank 1)"));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpCollectives,
                         ::testing::Values(CollectiveCase{"synchronized", false},
                                           CollectiveCase{"accumulated", true}),
                         [](const auto& test) { return test.param.name; });

// The collective is in the loss, as in a contrastive loss. So its backward runs before the backward
// reaches an output of the wrapper.
TEST(DdpCollectiveLoss, UnequalSharesAreRefusedOnAllRanks) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const ProcessGroup apart = *group.split({.color = 0, .name = "loss"});
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    net->to(kDouble);
    DistributedDataParallel model{net, group};
    const Tensor y = model(torch::ones({1 + group.rank(), 1}, kDouble));
    const Tensor loss = y.mean() * functional::all_reduce(y.sum(), apart);
    output = failure_of([&] { loss.backward(); });
    // The next step, without a collective, must be correct: (1 * 1 + 2 * 2) / 3.
    model->zero_grad();
    model(torch::full({1 + group.rank(), 1}, 1.0 + group.rank(), kDouble)).mean().backward();
    require(std::abs(net->weight.grad().item<double>() - 5.0 / 3) < 1e-12, "the next step");
    apart.close();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("unequal numbers of samples"));
  }
}

// The collective runs within pairs of ranks that divide a sequence: ranks 0 and 1, and ranks 2 and
// 3. The ranks of a pair have equal numbers of rows, so this is allowed.
TEST(DdpCollectiveLoss, CollectivesAmongRanksOfEqualSharesAreRight) {
  const auto result = run_groups(4, [&](const ProcessGroup& group, std::string&) {
    const int part = group.rank() / 2;
    const ProcessGroup pair = *group.split({.color = part, .name = "pair"});
    const auto net = std::make_shared<Summing>(pair);
    DistributedDataParallel model{net, group};
    // Ranks of the first pair have 1 row each, ranks of the second pair have 2.
    const Tensor x = torch::full({1 + part}, 1.0, kDouble);
    model(x).mean().backward();
    // Each row x = 1 contributes 1 plus the sum of the pair's rows: 1 + 2 for the 2 rows of the
    // first pair, 1 + 4 for the 4 rows of the second.
    require(std::abs(net->weight.grad().item<double>() - (2 * 3 + 4 * 5) / 6.0) < 1e-12,
            format("gradient {}", net->weight.grad().item<double>()));
    pair.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::ddp_collectives
