// Tests that each operation computes what its definition says, and that each error has its text.
// Ranks are threads.
#include "cadre/tensor/group/process_group.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

class OnRanks : public ::testing::TestWithParam<int> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(GetParam(), body);
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
        // The sum of bools is true if any value is true, and full() converts any number but 0 to
        // true.
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

// The reference applies PyTorch's own operators to the stacked inputs of all ranks.
TEST_P(OnRanks, AllReduceOfEveryOperationEqualsTorch) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const auto brought = [](int rank) { return (torch::arange(7) * 3 + rank * 5).fmod(6) + 1; };
    std::vector<Tensor> all;
    for (int rank = 0; rank < n; ++rank) all.push_back(brought(rank));
    const Tensor stacked = torch::stack(all).to(torch::kDouble);
    const auto reduced = [&](at::ScalarType type, const AllReduceOptions& options) {
      const Tensor tensor = brought(group.rank()).to(type);
      group.all_reduce(tensor, options);
      return tensor.to(torch::kDouble);
    };
    for (const at::ScalarType type :
         {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kShort}) {
      require(torch::equal(reduced(type, {.op = ReduceOp::kSum}), stacked.sum(0)), "sum");
      require(torch::equal(reduced(type, {.op = ReduceOp::kProduct}), stacked.prod(0)), "product");
      require(torch::equal(reduced(type, {.op = ReduceOp::kMin}), std::get<0>(stacked.min(0))),
              "min");
      require(torch::equal(reduced(type, {.op = ReduceOp::kMax}), std::get<0>(stacked.max(0))),
              "max");
    }
    Tensor band = all[0];
    Tensor bor = all[0];
    Tensor bxor = all[0];
    for (int rank = 1; rank < n; ++rank) {
      band = torch::bitwise_and(band, all[static_cast<size_t>(rank)]);
      bor = torch::bitwise_or(bor, all[static_cast<size_t>(rank)]);
      bxor = torch::bitwise_xor(bxor, all[static_cast<size_t>(rank)]);
    }
    require(torch::equal(reduced(torch::kChar, {.op = ReduceOp::kBand}), band.to(torch::kDouble)),
            "band");
    require(torch::equal(reduced(torch::kInt, {.op = ReduceOp::kBor}), bor.to(torch::kDouble)),
            "bor");
    require(torch::equal(reduced(torch::kLong, {.op = ReduceOp::kBxor}), bxor.to(torch::kDouble)),
            "bxor");
    Tensor weighted = torch::zeros({7}, torch::kDouble);
    for (int rank = 0; rank < n; ++rank) weighted += stacked[rank] * (rank + 0.5);
    const AllReduceOptions premul{.op = Reduction::premul_sum(group.rank() + 0.5)};
    require(torch::equal(reduced(torch::kHalf, premul), weighted), "premul_sum");
    const Tensor part = torch::empty({7}, torch::kDouble);
    group.reduce_scatter(part, brought(group.rank()).to(torch::kDouble).repeat({n}),
                         {.op = Reduction::premul_sum(group.rank() + 0.5)});
    require(torch::equal(part, weighted), "premul_sum, scattered");
  });
}

TEST_P(OnRanks, BoolsNaNsAndHalvesKeepTheTablesPromises) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const Tensor mine = torch::tensor({group.rank() == 0, true, false});
    const Tensor any = mine.clone();
    group.all_reduce(any, {.op = ReduceOp::kSum});
    require(torch::equal(any, torch::tensor({true, true, false})), "sum of bools is any");
    const Tensor every = mine.clone();
    group.all_reduce(every, {.op = ReduceOp::kProduct});
    require(torch::equal(every, torch::tensor({n == 1, true, false})), "product of bools is all");
    const Tensor last_has_nan = torch::full({3}, group.rank() == n - 1 ? NAN : 1.0F, torch::kHalf);
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const Tensor tensor = last_has_nan.clone();
      group.all_reduce(tensor, {.op = op});
      require(tensor.isnan().all().item<bool>(), "a NaN comes out");
    }
    // float16 cannot represent 2049. So the sum is right only if the ones are added to 2048 in
    // float32.
    const Tensor half = torch::full({3}, group.rank() == 0 ? 2048 : 1, torch::kHalf);
    group.all_reduce(half);
    require(torch::equal(half, torch::full({3}, 2048 + n - 1, torch::kFloat).to(torch::kHalf)),
            "rounded once");
  });
}

TEST_P(OnRanks, TheInputMayBeThisRanksSliceOfTheOutput) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const Tensor whole = torch::zeros({n, 3});
    whole[group.rank()].fill_(group.rank() + 1);
    group.all_gather(whole, whole[group.rank()]);
    for (int rank = 0; rank < n; ++rank) {
      require(torch::equal(whole[rank], torch::full({3}, rank + 1.0)), "gathered in place");
    }
    group.reduce_scatter(whole[group.rank()], whole);
    require(torch::equal(whole[group.rank()], torch::full({3}, n * (group.rank() + 1.0))),
            "scattered in place");
    const Tensor scalar = torch::tensor(group.rank() + 1.0);
    const Tensor scalars = torch::empty({n}, torch::kDouble);
    group.all_gather(scalars, scalar.to(torch::kDouble));
    require(torch::equal(scalars, torch::arange(1, n + 1, torch::kDouble)), "0-dim");
    group.all_gather(torch::empty({n, 0}), torch::empty({0}));
    const torch::NoGradGuard no_grad;
    Tensor leaf = torch::ones({n, 3}).requires_grad_(true);
    const Tensor row = torch::zeros({3}).requires_grad_(true);
    group.reduce_scatter(row, leaf);
    require(torch::equal(row.detach(), torch::full({3}, 1.0 * n)), "leaves that require grad");
    require(row.is_leaf() && leaf.is_leaf(), "no graph");
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

    const torch::NoGradGuard no_grad;
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

TEST_P(OnRanks, AsynchronousGatherAndBroadcast) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const Tensor input = torch::arange(4) + 10 * group.rank();
    const Tensor gathered = torch::empty({n, 4}, torch::kLong);
    const Work gather = group.all_gather_async(gathered, input);
    const int root = n - 1;
    const Tensor words = torch::full({5}, group.rank() + 1.0);
    const Work broadcast = group.broadcast_async(words, {.root = root});
    broadcast.wait();
    gather.wait();
    require(gather.is_completed() && broadcast.is_completed(), "done after the waits");
    require(torch::equal(gathered, torch::arange(n).unsqueeze(1) * 10 + torch::arange(4)),
            "rows in rank order");
    require(torch::equal(words, torch::full({5}, root + 1.0)), "the root's");
  });
}

TEST_P(OnRanks, ReduceToTheRootLeavesTheOthersAlone) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const int root = n - 1;
    const bool is_root = group.rank() == root;
    const Tensor base = torch::full({4, 6}, group.rank() + 1.0);
    group.reduce(base.t(), {.root = root});
    require(torch::equal(base, torch::full({4, 6}, is_root ? n * (n + 1) / 2.0 : group.rank() + 1)),
            "the sum in a transposed view on the root");
    const torch::NoGradGuard no_grad;
    const Tensor leaf = torch::full({3}, group.rank() + 1.0).requires_grad_(true);
    group.reduce_async(leaf, {.root = root, .op = ReduceOp::kMax}).wait();
    require(torch::equal(leaf.detach(), torch::full({3}, is_root ? n : group.rank() + 1.0)),
            "the largest");
  });
}

TEST_P(OnRanks, GatherToAndScatterFromTheRoot) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    for (int root = 0; root < n; ++root) {
      const bool is_root = group.rank() == root;
      const Tensor rows = torch::arange(n).unsqueeze(1) * 10 + torch::arange(4);
      const Tensor gathered = is_root ? torch::empty({n, 4}, torch::kLong) : Tensor();
      group.gather(gathered, rows[group.rank()], {.root = root});
      require(!is_root || torch::equal(gathered, rows), "rows in rank order");
      const Tensor piece = torch::empty({4}, torch::kLong);
      group.scatter(piece, is_root ? rows.contiguous() : Tensor(), {.root = root});
      require(torch::equal(piece, rows[group.rank()]), "this rank's row");
      const Tensor again = is_root ? torch::empty({n * 4}, torch::kLong) : Tensor();
      group.gather_async(again, piece, {.root = root}).wait();
      require(!is_root || torch::equal(again, rows.flatten()), "the same, flat");
      group.scatter_async(piece, again, {.root = root}).wait();
      require(torch::equal(piece, rows[group.rank()]), "this rank's row again");
    }
  });
}

TEST_P(OnRanks, AllToAllExchangesRows) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const int me = group.rank();
    // Rows 2j and 2j + 1 of rank i's input go to rank j.
    const auto row = [](int from, int to) { return torch::full({1, 3}, 100 * from + to); };
    std::vector<Tensor> to;
    std::vector<Tensor> from;
    AllToAllOptions uneven;
    std::vector<Tensor> uneven_to;
    std::vector<Tensor> uneven_from;
    for (int other = 0; other < n; ++other) {
      to.insert(to.end(), 2, row(me, other));
      from.insert(from.end(), 2, row(other, me));
      // Rank i sends i + j rows to rank j, so rank 0 sends no row to itself.
      uneven.input_split_sizes.push_back(me + other);
      uneven.output_split_sizes.push_back(other + me);
      uneven_to.insert(uneven_to.end(), static_cast<size_t>(me + other), row(me, other));
      uneven_from.insert(uneven_from.end(), static_cast<size_t>(me + other), row(other, me));
    }
    const Tensor output = torch::zeros({2 * n, 3}, torch::kLong);
    group.all_to_all(output, torch::cat(to));
    require(torch::equal(output, torch::cat(from)), "two rows from each");

    const auto cat = [](const std::vector<Tensor>& rows) {
      return rows.empty() ? torch::zeros({0, 3}, torch::kLong) : torch::cat(rows);
    };
    const Tensor received = torch::zeros_like(cat(uneven_from));
    group.all_to_all(received, cat(uneven_to), uneven);
    require(torch::equal(received, cat(uneven_from)), "as many rows as the splits say");
    received.zero_();
    group.all_to_all_async(received, cat(uneven_to), uneven).wait();
    require(torch::equal(received, cat(uneven_from)), "also later");
  });
}

TEST(ProcessGroup, SplitsThatDisagreeAreExplainedOnAllRanks) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    AllToAllOptions options{.output_split_sizes = {2, 2, 2}, .input_split_sizes = {2, 2, 2}};
    if (group.rank() == 2) options.output_split_sizes[0] = 1;
    const Tensor output = torch::zeros({group.rank() == 2 ? 5 : 6, 4});
    const std::string failure = failure_of([&] {
      group.all_to_all(output, torch::ones({6, 4}), options);
    });
    require(failure.starts_with(
                "kInvalidArgument: all_to_all (all_to_all_v #1) on group \"world\" failed") &&
                failure.find("the ranks disagree: rank 0 (") != std::string::npos &&
                failure.find(") sends float32 x 8 to rank 2 (") != std::string::npos &&
                failure.find("), which expects 4.") != std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The shapes of the ranks differ but have the same number of elements, so only a comparison of
// shapes can detect the error.
TEST(ProcessGroup, ShapesThatDisagreeAreExplainedOnAllRanks) {
  struct Call {
    const char* name;
    std::function<void(const ProcessGroup&, const Tensor& small, const Tensor& large)> run;
  };
  const std::vector<Call> calls = {
      {"all_reduce(sum, ", [](auto& group, auto& small, auto&) { group.all_reduce(small); }},
      {"broadcast(", [](auto& group, auto& small, auto&) { group.broadcast(small); }},
      {"reduce(sum, ", [](auto& group, auto& small, auto&) { group.reduce(small); }},
      {"all_gather(",
       [](auto& group, auto& small, auto& large) { group.all_gather(large, small); }},
      {"gather(", [](auto& group, auto& small, auto& large) { group.gather(large, small); }},
      {"scatter(", [](auto& group, auto& small, auto& large) { group.scatter(small, large); }},
      {"reduce_scatter(sum, ",
       [](auto& group, auto& small, auto& large) { group.reduce_scatter(small, large); }},
      {"all_to_all(",
       [](auto& group, auto& small, auto&) { group.all_to_all(torch::zeros_like(small), small); }}};
  for (const Call& call : calls) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const bool is_first = group.rank() == 0;
      const Tensor small = is_first ? torch::ones({4, 3, 2}) : torch::ones({4, 6});
      const std::string failure = failure_of([&] {
        call.run(group, small, torch::ones({2, 24}));
        group.barrier();
      });
      const std::string called = std::string(") called ") + call.name + "float32 x ";
      require(failure.find(called + "[4, 3, 2]") != std::string::npos &&
                  failure.find(called + "[4, 6]") != std::string::npos,
              failure);
    });
    EXPECT_TRUE(result.ok()) << call.name << result.failures();
  }
}

TEST_P(OnRanks, SymmetricMemoryIsZeroedAndOutlivesTheGroup) {
  std::vector<Tensor> kept(static_cast<size_t>(GetParam()));
  expect_on_all([&](const ProcessGroup& group) {
    const Tensor tensor = SymmetricTensor::allocate(group, 5000, torch::kDouble).local();
    require(tensor.count_nonzero().item<int64_t>() == 0, "zeroed");
    tensor.fill_(group.rank() + 1);
    group.all_reduce(tensor);
    for (const int64_t numel : {int64_t{0}, int64_t{1} << 61, (int64_t{1} << 61) + 512}) {
      const std::string failure =
          testing::failure_of([&] { (void)SymmetricTensor::allocate(group, numel, torch::kLong); });
      require(failure.find("pass a count from 1 to") != std::string::npos, failure);
    }
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
  const auto result = run_groups(2, [](const ProcessGroup& group) {
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

}  // namespace
}  // namespace cadre
