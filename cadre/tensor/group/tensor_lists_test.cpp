// Tests the operations on lists, the coalesced operations and the batches of messages: their
// results, and the errors for invalid arguments. Ranks are threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

class ListsOnRanks : public ::testing::TestWithParam<std::tuple<int, TransportChoice>> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const auto& [world_size, transport] = GetParam();
    const testing::RanksResult result = run_groups(world_size, body, {.transport = transport});
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

INSTANTIATE_TEST_SUITE_P(ProcessGroup, ListsOnRanks,
                         ::testing::Values(std::tuple(1, TransportChoice::kAuto),
                                           std::tuple(2, TransportChoice::kAuto),
                                           std::tuple(3, TransportChoice::kAuto),
                                           std::tuple(4, TransportChoice::kAuto),
                                           std::tuple(3, TransportChoice::kTcp)));

// Returns the rows that rank `from` sends to rank `to`: (rows, 2), in memory that is not
// contiguous. For some pairs of ranks there are no rows.
Tensor brought(int from, int to, int64_t rows, at::ScalarType type = torch::kFloat) {
  return (torch::arange(rows * 2, torch::kLong).view({2, rows}) % 5 + from + 2 * to).to(type).t();
}

int64_t uneven_rows(int rank) {
  return rank % 3 == 1 ? 0 : 2 + rank;
}

// Returns zeros whose layout differs from that of the input, so that the result must be copied.
Tensor empty_like_rows(int64_t rows, at::ScalarType type = torch::kFloat) {
  return torch::zeros({rows, 4}, type).slice(1, 0, 4, 2);
}

TEST_P(ListsOnRanks, AllGatherOfUnevenAndEvenLists) {
  expect_on_all([](const ProcessGroup& group) {
    for (int d = 0; d < kNumDTypes; ++d) {
      const at::ScalarType type = to_scalar_type(static_cast<DType>(d));
      for (const bool is_even : {false, true}) {
        const auto rows = [&](int rank) { return is_even ? 3 : uneven_rows(rank); };
        Tensors outputs;
        Tensors later;
        for (int rank = 0; rank < group.world_size(); ++rank) {
          outputs.push_back(empty_like_rows(rows(rank), type));
          later.push_back(torch::zeros({rows(rank) * 2}, type));
        }
        const Tensor input = brought(group.rank(), 0, rows(group.rank()), type);
        group.all_gather(outputs, input);
        group.all_gather_async(later, input).wait();
        for (int rank = 0; rank < group.world_size(); ++rank) {
          const Tensor expected = brought(rank, 0, rows(rank), type);
          require(torch::equal(outputs[static_cast<size_t>(rank)], expected), "gathered");
          require(torch::equal(later[static_cast<size_t>(rank)], expected.reshape({-1})),
                  "gathered later, flat");
        }
      }
    }
  });
}

// Tensors of a list may differ in shape even if they have the same number of elements.
TEST(ProcessGroupListsTest, PartsMayDifferInShape) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& group) {
    const auto shape_of = [](int rank) {
      return rank == 0 ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2};
    };
    const Tensors outputs = {torch::zeros(shape_of(0)), torch::zeros(shape_of(1))};
    group.all_gather(outputs, torch::full(shape_of(group.rank()), group.rank() + 1.0));
    for (int rank = 0; rank < 2; ++rank) {
      require(
          torch::equal(outputs[static_cast<size_t>(rank)], torch::full(shape_of(rank), rank + 1.0)),
          "gathered");
    }
    const Tensor sum = torch::zeros(shape_of(group.rank()));
    group.reduce_scatter(sum, {torch::ones(shape_of(0)), torch::full(shape_of(1), 2.0)});
    require(torch::equal(sum, torch::full(shape_of(group.rank()), 2.0 * (group.rank() + 1))),
            "reduced");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

Tensor reduced(ReduceOp op, const Tensor& stacked) {
  switch (op) {
    case ReduceOp::kMax:
      return std::get<0>(stacked.max(0));
    case ReduceOp::kMin:
      return std::get<0>(stacked.min(0));
    case ReduceOp::kProduct:
      return stacked.prod(0);
    case ReduceOp::kAvg:
      return stacked.mean(0);
    default:
      return stacked.sum(0);
  }
}

TEST_P(ListsOnRanks, ReduceScatterOfUnevenAndEvenListsOfEveryDType) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    for (int d = 0; d < kNumDTypes; ++d) {
      const at::ScalarType type = to_scalar_type(static_cast<DType>(d));
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct, ReduceOp::kAvg}) {
        if (op == ReduceOp::kAvg && !at::isFloatingType(type)) continue;
        for (const bool is_even : {false, true}) {
          const auto rows = [&](int rank) { return is_even ? 3 : uneven_rows(rank); };
          Tensors inputs;
          Tensors stacked;
          for (int rank = 0; rank < n; ++rank) {
            inputs.push_back(brought(group.rank(), rank, rows(rank), type));
            stacked.push_back(brought(rank, group.rank(), rows(group.rank()), type));
          }
          const Tensor output = empty_like_rows(rows(group.rank()), type);
          group.reduce_scatter(output, inputs, {.op = op});
          // Products are at most 13^4. Every dtype represents them exactly, except those of 8 and
          // 16 bits, which saturate or round and are compared for max and min only.
          const Tensor exact = reduced(op, torch::stack(stacked).to(torch::kDouble));
          const bool is_narrow = at::elementSize(type) < 4 && type != torch::kBool;
          if (!is_narrow || op == ReduceOp::kMax || op == ReduceOp::kMin) {
            require(torch::allclose(output.to(torch::kDouble), exact.to(type).to(torch::kDouble)),
                    "reduced");
          }
          const Tensor flat = torch::zeros({rows(group.rank()) * 2}, type);
          group.reduce_scatter_async(flat, inputs, {.op = op}).wait();
          require(torch::equal(flat.view({-1, 2}), output), "the same bits later, contiguous");
        }
      }
    }
  });
}

// The sum of float16 values must be accumulated in float32 and rounded once, as in all_reduce: 2048
// + 1 + 1 would stay 2048 in float16.
TEST_P(ListsOnRanks, AnUnevenReduceScatterOfHalvesIsRoundedOnce) {
  expect_on_all([](const ProcessGroup& group) {
    Tensors inputs;
    for (int rank = 0; rank < group.world_size(); ++rank) {
      inputs.push_back(
          torch::full({uneven_rows(rank)}, group.rank() == 0 ? 2048 : 1, torch::kHalf));
    }
    const Tensor output = torch::zeros({uneven_rows(group.rank())}, torch::kHalf);
    group.reduce_scatter(output, inputs);
    const float sum = 2048.0F + static_cast<float>(group.world_size() - 1);
    require(torch::equal(output, torch::full_like(output, sum)), "added in float32");
    group.reduce_scatter(output, inputs, {.op = Reduction::premul_sum(0.5)});
    require(torch::equal(output, torch::full_like(output, sum / 2)), "with a factor");
  });
}

TEST_P(ListsOnRanks, GatherAndScatterListsOfTheRoot) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    for (int root = 0; root < n; ++root) {
      const bool is_root = group.rank() == root;
      Tensors outputs;
      Tensors inputs;
      for (int rank = 0; is_root && rank < n; ++rank) {
        outputs.push_back(empty_like_rows(3));
        inputs.push_back(brought(root, rank, 3));
      }
      group.gather(outputs, brought(group.rank(), 7, 3), {.root = root});
      for (int rank = 0; is_root && rank < n; ++rank) {
        require(torch::equal(outputs[static_cast<size_t>(rank)], brought(rank, 7, 3)), "gathered");
        outputs[static_cast<size_t>(rank)].zero_();
      }
      group.gather_async(outputs, brought(group.rank(), 9, 3), {.root = root}).wait();
      for (int rank = 0; is_root && rank < n; ++rank) {
        require(torch::equal(outputs[static_cast<size_t>(rank)], brought(rank, 9, 3)), "later");
      }
      for (const bool is_async : {false, true}) {
        const Tensor output = empty_like_rows(3);
        if (is_async) {
          group.scatter_async(output, inputs, {.root = root}).wait();
        } else {
          group.scatter(output, inputs, {.root = root});
        }
        require(torch::equal(output, brought(root, group.rank(), 3)), "scattered");
      }
    }
  });
}

TEST_P(ListsOnRanks, AllToAllOfUnevenLists) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    for (const bool is_async : {false, true}) {
      Tensors inputs;
      Tensors outputs;
      for (int other = 0; other < n; ++other) {
        inputs.push_back(brought(group.rank(), other, uneven_rows(group.rank() + 2 * other)));
        outputs.push_back(empty_like_rows(uneven_rows(other + 2 * group.rank())));
      }
      if (is_async) {
        group.all_to_all_async(outputs, inputs).wait();
      } else {
        group.all_to_all(outputs, inputs);
      }
      for (int other = 0; other < n; ++other) {
        require(torch::equal(outputs[static_cast<size_t>(other)],
                             brought(other, group.rank(), uneven_rows(other + 2 * group.rank()))),
                "exchanged");
      }
    }
  });
}

TEST_P(ListsOnRanks, CoalescedCallsAreTheCallsOneByOne) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    Tensors sums = {torch::full({3}, group.rank() + 1.0),
                    torch::full({}, group.rank(), torch::kInt), torch::full({0}, 1.0),
                    torch::full({70000}, group.rank() + 1, torch::kLong)};
    group.all_reduce_coalesced(sums);
    require(torch::equal(sums[0], torch::full({3}, n * (n + 1) / 2.0)), "floats");
    require(sums[1].item<int>() == n * (n - 1) / 2, "a number");
    require(torch::equal(sums[3], torch::full({70000}, n * (n + 1) / 2, torch::kLong)), "large");
    const Work work = group.all_reduce_coalesced_async(sums, {.op = ReduceOp::kMax});
    work.wait();
    require(work.is_completed() && !work.error(), "done");

    const Tensors gathered = {torch::empty({n, 3}), torch::empty({2 * n}, torch::kLong)};
    const Tensors inputs = {torch::full({3}, group.rank() + 0.5), torch::arange(2) + group.rank()};
    group.all_gather_coalesced(gathered, inputs);
    const Tensor ranks = torch::arange(n).unsqueeze(1);
    require(torch::equal(gathered[0], (ranks + 0.5).expand({n, 3})), "gathered");
    require(torch::equal(gathered[1].view({n, 2}), ranks + torch::arange(2)), "and the other");

    const Tensors parts = {torch::empty({3}), torch::empty({2}, torch::kLong)};
    group.reduce_scatter_coalesced(parts, gathered);
    require(torch::equal(parts[0], torch::full({3}, n * (group.rank() + 0.5))), "scattered");
    require(torch::equal(parts[1], n * (torch::arange(2) + group.rank())), "and the other");
  });
}

// The messages are large, so a blocking send waits for its receive. All ranks send before they
// receive, which would deadlock with blocking calls.
TEST_P(ListsOnRanks, ABatchOfSendsBeforeReceives) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    if (n == 1) return group.batch_send_recv({});
    const int right = (group.rank() + 1) % n;
    const int left = (group.rank() + n - 1) % n;
    const Tensor values = torch::arange(60'000, torch::kDouble) + group.rank();
    const Tensor from_left = torch::zeros_like(values);
    const Tensor from_right = torch::zeros({3, 2}, torch::kInt);
    group.batch_send_recv({P2POp::send(values, right, 4),
                           P2POp::send(torch::full({2, 3}, group.rank(), torch::kInt).t(), left),
                           P2POp::recv(from_left, left, 4), P2POp::recv(from_right, right)});
    require(torch::equal(from_left, torch::arange(60'000, torch::kDouble) + left), "of the left");
    require(torch::equal(from_right, torch::full({3, 2}, right, torch::kInt)), "of the right");
    from_left.zero_();
    const Work work =
        group.batch_send_recv_async({P2POp::send(values, right), P2POp::recv(from_left, left)});
    work.wait(testing::kRankTimeout);
    require(torch::equal(from_left, torch::arange(60'000, torch::kDouble) + left), "later");
  });
}

TEST_P(ListsOnRanks, ReceivesFromAnyRankAndABarrierInTheBackground) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    if (group.rank() > 0) group.send(torch::full({2, 3}, group.rank()), 0, {.tag = 5});
    std::vector<bool> has_come(static_cast<size_t>(n));
    for (int i = 1; group.rank() == 0 && i < n; ++i) {
      const Tensor base = torch::zeros({3, 2}, torch::kLong);
      const int source = group.recv_from_any(base.t(), {.tag = 5});
      require(torch::equal(base, torch::full({3, 2}, source)), "of the rank that it returns");
      require(!has_come[static_cast<size_t>(source)], "each once");
      has_come[static_cast<size_t>(source)] = true;
    }
    const Work work = group.barrier_async();
    work.wait();
    require(work.is_completed(), "all have come");
  });
}

// Each rank waits for an operation that the other rank does not call.
TEST(ProcessGroup, ACloseAtItsDeadlineAbortsWhatIsPending) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      const std::string failure = failure_of([&] { group.recv(torch::zeros({2}), 0); });
      require(failure.find("kAborted") == 0, failure);
      return;
    }
    const Work work = group.all_reduce_async(torch::zeros({2}));
    group.close(std::chrono::milliseconds(50));
    const std::string failure = failure_of([&] { work.wait(); });
    require(failure.find("kAborted") == 0 &&
                failure.find("close() reached its deadline while operations were pending") !=
                    std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ProcessGroup, UnevenListsThatDisagreeAreExplainedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensors outputs = {torch::zeros({1}), torch::zeros({group.rank() == 0 ? 2 : 3})};
    const std::string failure = failure_of([&] {
      group.all_gather(outputs, outputs[static_cast<size_t>(group.rank())]);
      group.barrier();
    });
    require(failure.find("all_gather_v(float32 x [1, 2])") != std::string::npos &&
                failure.find("all_gather_v(float32 x [1, 3])") != std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 is late. If the timeout of a wait() expires, the operation continues; if the timeout of
// the operation itself expires, the group fails.
TEST(ProcessGroup, TimeoutsOfWaitsAndOfCalls) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    constexpr auto kShort = std::chrono::milliseconds(20);
    const Tensor sum = torch::ones({2});
    if (group.rank() == 0) {
      const Work work = group.all_reduce_async(sum);
      const std::string failure = failure_of([&] { work.wait(kShort); });
      require(failure.starts_with("kTimeout: "), failure);
      group.send(sum, 1);
      work.wait();
    } else {
      const Tensor token = torch::zeros({2});
      group.recv(token, 0, {.timeout = testing::kRankTimeout});
      group.all_reduce(sum, {.timeout = testing::kRankTimeout});
    }
    require(torch::equal(sum, torch::full({2}, 2.0)), "the sum of both");
    const std::string failure = failure_of([&] {
      if (group.rank() == 0) return group.barrier({.timeout = kShort});
      group.recv(sum, 0);  // throws when the group fails
    });
    require(failure.starts_with(group.rank() == 0 ? "kTimeout: barrier #2" : "k"), failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
