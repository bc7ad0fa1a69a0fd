#include "cadre/tensor/group/symmetric_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

TEST(SymmetricTensor, EachRankWritesAndSignalsToTheNext) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    const int right = (group.rank() + 1) % 3;
    const int left = (group.rank() + 2) % 3;
    const auto tensor = SymmetricTensor::allocate(group, 1000, torch::kDouble);
    require(tensor.shares_memory(), "threads of one process share memory");
    require(tensor.local().numel() == 1000 && tensor.local().count_nonzero().item<int>() == 0,
            "zeroed");
    group.barrier();
    tensor.peer(right).fill_(group.rank() + 1);
    tensor.signal(right, 3);
    tensor.wait_signal(left, 3, {.timeout = testing::kRankTimeout});
    require(torch::equal(tensor.local(), torch::full({1000}, left + 1.0, torch::kDouble)),
            "what the left neighbour has written");
    require(tensor.peer(group.rank()).data_ptr() == tensor.local().data_ptr(), "its own");
    group.barrier();
    require(torch::equal(tensor.peer(left), torch::full({1000}, right + 1.0, torch::kDouble)),
            "read in place");
    group.barrier();
    group.all_reduce(tensor.local());
    require(tensor.local()[0].item<double>() == 6, "1 + 2 + 3");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(SymmetricTensor, ItsTensorsOutliveTheGroup) {
  std::vector<Tensor> kept(2);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto tensor = SymmetricTensor::allocate(group, 5, torch::kInt);
    tensor.local().fill_(group.rank() + 1);
    group.barrier();
    kept[static_cast<size_t>(group.rank())] = tensor.peer(1 - group.rank());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(kept[0].sum().item<int>(), 10);
  EXPECT_EQ(kept[1].sum().item<int>(), 5);
}

TEST(SymmetricTensor, RefusalsAndTimeouts) {
  const auto result = run_groups(
      2,
      [](const ProcessGroup& group) {
        const auto failure =
            failure_of([&] { SymmetricTensor::allocate(group, 4, torch::kComplexFloat); });
        require(
            failure.find("SymmetricTensor::allocate on group \"world\"") != std::string::npos &&
                failure.find("elements of dtype complex64 cannot be shared") != std::string::npos,
            failure);
        require(!failure_of([&] { SymmetricTensor::allocate(group, 0, torch::kInt); }).empty(),
                "no elements");
        const auto tensor = SymmetricTensor::allocate(group, 4, torch::kInt);
        require(!tensor.shares_memory(), "over TCP");
        require(failure_of([&] { tensor.peer(1 - group.rank()); }).starts_with("kInvalidArgument"),
                "is out of reach");
      },
      TransportChoice::kTcp);
  EXPECT_TRUE(result.ok()) << result.failures();
  const auto late = run_groups(2, [](const ProcessGroup& group) {
    const auto tensor = SymmetricTensor::allocate(group, 4, torch::kInt);
    const std::string failure = failure_of([&] {
      if (group.rank() == 0)
        return tensor.wait_signal(1, 0, {.timeout = std::chrono::milliseconds(20)});
      group.recv(tensor.local(), 0);  // ends when the group ends
    });
    require(group.rank() == 1 || failure.starts_with("kTimeout: "), failure);
    require(!failure.empty(), "on both ranks");
  });
  EXPECT_TRUE(late.ok()) << late.failures();
}

}  // namespace
}  // namespace cadre
