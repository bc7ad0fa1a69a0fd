// Each operation against its formula on thread ranks, and each refusal by its sentence.
#include "cadre/group/process_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/group/dtype.h"
#include "cadre/os/system.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

constexpr Duration kTimeout = std::chrono::seconds(20);

testing::RanksResult run(int world_size, const std::function<void(const ProcessGroup&)>& body) {
  const std::unique_ptr<os::System> system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return testing::run_ranks_as_threads(world_size, [&](testing::RankContext& context) {
    const Membership membership{.rank = context.rank,
                                .world_size = world_size,
                                .store = world_size > 1 ? store : nullptr,
                                .job_token = "test"};
    const ProcessGroup group(Communicator::connect(
        context.system, membership, {.timeout = kTimeout}, context.system.deadline_in(kTimeout)));
    body(group);
    group.close();
  });
}

class OnRanks : public ::testing::TestWithParam<int> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run(GetParam(), body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

INSTANTIATE_TEST_SUITE_P(ProcessGroup, OnRanks, ::testing::Values(1, 2, 3));

TEST_P(OnRanks, AllReduceOfEveryDTypeAndShape) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    for (int d = 0; d < kNumDTypes; ++d) {
      const at::ScalarType type = to_scalar_type(static_cast<DType>(d));
      for (const std::vector<int64_t>& shape :
           {std::vector<int64_t>{}, {0}, {1}, {3, 5}, {40000}}) {
        const Tensor tensor = torch::full(shape, group.rank() + 1, type);
        group.all_reduce(tensor);
        require(torch::equal(tensor, torch::full(shape, n * (n + 1) / 2, type)), "sum");
        const Tensor largest = torch::full(shape, group.rank() + 1, type);
        group.all_reduce_async(largest, {.op = ReduceOp::kMax}).wait();
        require(torch::equal(largest, torch::full(shape, n, type)), "max");
      }
    }
    const Tensor mean = torch::full({7}, group.rank() + 1.0);
    group.all_reduce(mean, {.op = ReduceOp::kAvg});
    require(torch::allclose(mean, torch::full({7}, (n + 1) / 2.0)), "average");
  });
}

TEST_P(OnRanks, NonContiguousTensorsAndLeavesThatRequireGrad) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const Tensor base = torch::zeros({4, 6});
    const Tensor columns = base.narrow(1, 1, 2).t();
    columns.fill_(group.rank() + 1);
    group.all_reduce(columns);
    require(torch::equal(columns, torch::full({2, 4}, n * (n + 1) / 2.0)), "the view");
    require(base.sum().item<double>() == 8 * n * (n + 1) / 2.0, "nothing around it");

    Tensor leaf = torch::full({3}, group.rank() + 5.0).requires_grad_(true);
    group.broadcast(leaf, {.root = n - 1});
    require(torch::equal(leaf.detach(), torch::full({3}, n + 4.0)), "the last rank's values");
    require(leaf.is_leaf() && !leaf.grad_fn(), "no graph");
  });
}

TEST_P(OnRanks, GatherAndScatterInRankOrder) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const Tensor input = torch::arange(4) + 10 * group.rank();
    const Tensor gathered = torch::empty({n, 4}, torch::kLong);
    group.all_gather(gathered, input);
    const Tensor rows = torch::arange(n).unsqueeze(1) * 10 + torch::arange(4);
    require(torch::equal(gathered, rows), "rows in rank order");

    const Tensor piece = torch::empty({4}, torch::kLong);
    group.reduce_scatter_async(piece, rows.contiguous()).wait();
    require(torch::equal(piece, rows[group.rank()] * n), "this rank's row, summed");
    group.barrier();
  });
}

TEST_P(OnRanks, SymmetricMemoryIsZeroedAndOutlivesTheGroup) {
  std::vector<Tensor> kept(static_cast<size_t>(GetParam()));
  expect_on_all([&](const ProcessGroup& group) {
    const Tensor tensor = group.empty_symmetric(5000, torch::kDouble);
    require(tensor.count_nonzero().item<int64_t>() == 0, "zeroed");
    tensor.fill_(group.rank() + 1);
    group.all_reduce(tensor);
    require(group.empty_symmetric(0, torch::kFloat).numel() == 0, "empty");
    kept[group.rank()] = tensor;
  });
  const double sum = GetParam() * (GetParam() + 1) / 2.0;
  for (const Tensor& tensor : kept) {
    EXPECT_TRUE(torch::equal(tensor, torch::full({5000}, sum, torch::kDouble)));
  }
}

TEST_P(OnRanks, SendAndReceiveAroundTheRing) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    if (n == 1) return;
    const int own_rank = group.rank();
    const int left = (own_rank + n - 1) % n;
    const Tensor pattern = torch::arange(6).view({3, 2});
    const Work sent = group.send_async(pattern + own_rank, (own_rank + 1) % n, {.tag = 3});
    const Tensor received = torch::zeros({3, 2}, torch::kLong);
    group.recv(received, left, {.tag = 3});
    sent.wait();
    require(torch::equal(received, pattern + left), "the left neighbour's");
  });
}

TEST(ProcessGroup, AnAsynchronousCallKeepsItsTensorsAlive) {
  const auto result = run(2, [](const ProcessGroup& group) {
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      works.push_back(group.all_reduce_async(torch::full({3000}, 1.0 + i)));
    }
    for (const Work& work : works) work.wait();
    const Tensor last = torch::ones({4});
    group.all_reduce(last);
    require(torch::equal(last, torch::full({4}, 2.0)), "the operations stayed in step");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroup, RefusesWhatCannotTakePart) {
  const auto result = run(1, [](const ProcessGroup& group) {
    const auto expect = [](const std::function<void()>& call, const std::string& text) {
      const std::string failure = failure_of(call);
      require(failure.find("kInvalidArgument") != std::string::npos &&
                  failure.find(text) != std::string::npos,
              "expected \"" + text + "\", got \"" + failure + "\"");
    };
    const std::string where = "on group \"world\", rank 0: ";
    expect([&] { group.all_reduce(Tensor()); }, "all_reduce " + where + "the tensor is undefined");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kHalf)); },
           "the tensor (2) is Half; supported are");
    expect([&] { group.broadcast(torch::zeros({2, 2}).to_sparse()); }, "is sparse");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kMeta)); }, "is on meta");
    expect([&] { group.all_reduce(torch::zeros({2}, torch::kInt), {.op = ReduceOp::kAvg}); },
           "avg has no meaning for int32");
    expect([&] { (void)group.all_reduce_async(torch::zeros({4, 4}).t()); }, "is not contiguous");
    expect([&] { group.all_gather(torch::zeros({3}), torch::zeros({2})); },
           "the output has 3 elements (3), expected world size 1 times the input's 2 (2)");
    expect([&] { group.reduce_scatter(torch::zeros({2}), torch::zeros({2}, torch::kInt)); },
           "the input is Int but the output is Float");
    expect([&] { (void)group.empty_symmetric(4, torch::kBool); }, "elements of Bool");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroup, WithoutALauncherTheWorldIsThisProcess) {
  const ProcessGroup world = init_process_group();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.world_size(), 1);
  const Tensor tensor = torch::full({3}, 4.0);
  world.all_reduce(tensor, {.op = ReduceOp::kAvg});
  EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 4.0)));
  world.close();
}

}  // namespace
}  // namespace cadre
