#include "cadre/tensor/group/symmetric_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>
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
      {.transport = TransportChoice::kTcp});
  EXPECT_TRUE(result.ok()) << result.failures();
  const auto late = run_groups(2, [](const ProcessGroup& group) {
    const auto tensor = SymmetricTensor::allocate(group, 4, torch::kInt);
    const std::string failure = failure_of([&] {
      if (group.rank() == 0)
        return tensor.wait_signal(1, 0, {.timeout = std::chrono::milliseconds(20)});
      group.recv(tensor.local(), 0);  // throws when the group fails
    });
    require(group.rank() == 1 || failure.starts_with("kTimeout: "), failure);
    require(!failure.empty(), "on both ranks");
  });
  EXPECT_TRUE(late.ok()) << late.failures();
}

TEST(SymmetricTensor, WhatAnOwnerWritesAllReadInTheWhole) {
  for (const int world_size : {1, 2, 3, 8}) {
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      std::optional<SymmetricTensor> parts = SymmetricTensor::allocate(
          group, 1024, torch::kDouble, {.with_whole = true});  // two pages
      require(parts->has_whole(), "mapped");
      const Tensor whole = parts->whole();
      const Tensor own = parts->local();
      require(whole.numel() == 1024 * world_size && own.numel() == 1024, "sizes");
      require(!own.storage().is_alias_of(whole.storage()), "a storage of its own");
      require(whole.sum().item<double>() == 0, "zeroed");
      group.barrier();
      for (int round = 1; round <= 20; ++round) {
        own.fill_(round * 10 + group.rank());
        parts->signal_peers(3);
        parts->wait_for_peers(3, {.timeout = testing::kRankTimeout});
        for (int rank = 0; rank < world_size; ++rank) {
          const Tensor part = whole.narrow(0, 1024 * rank, 1024);
          require(part.eq(round * 10 + rank).all().item<bool>(), "what its owner wrote");
        }
        group.barrier();
      }
      parts->signal(group.rank(), 4);
      parts->wait_signal(group.rank(), 4);  // a rank may signal itself
      group.barrier();  // all ranks have received their signal before one leaves
      parts.reset();
      require(own[5].item<double>() == 200 + group.rank(), "the tensors keep the memory");
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

TEST(SymmetricTensor, HasNoWholeWhereRanksShareNoMemoryOrNobodyAsksForIt) {
  const auto refused = [](const SymmetricTensor& tensor) {
    require(!tensor.has_whole(), "no whole");
    const std::string failure = failure_of([&] { tensor.whole(); });
    require(failure.starts_with("kInvalidArgument: ") &&
                failure.find("{.with_whole = true}") != std::string::npos,
            failure);
  };
  const auto over_tcp = run_groups(2,
                                   [&](const ProcessGroup& group) {
                                     const auto parts = SymmetricTensor::allocate(
                                         group, 1024, torch::kFloat, {.with_whole = true});
                                     refused(parts);
                                     require(parts.local().numel() == 1024, "its own");
                                     group.barrier();
                                   },
                                   {.transport = TransportChoice::kTcp});
  EXPECT_TRUE(over_tcp.ok()) << over_tcp.failures();
  const auto unasked = run_groups(2, [&](const ProcessGroup& group) {
    refused(SymmetricTensor::allocate(group, 1024, torch::kFloat));
    group.barrier();
  });
  EXPECT_TRUE(unasked.ok()) << unasked.failures();
}

TEST(SymmetricTensor, RefusesAWholeOfPartsThatAreNotWholePages) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const std::string failure = failure_of(
        [&] { SymmetricTensor::allocate(group, 1023, torch::kFloat, {.with_whole = true}); });
    require(failure.starts_with("kInvalidArgument: "), failure);
    require(failure.find("1023 elements of float32 are 4092 bytes") != std::string::npos, failure);
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
