// Tests FakeGroup, the group that tests of wrappers use: it passes collectives on unchanged by
// default, and a test can drop, change, delay or fail any single collective.
#include "cadre/testing/torch/group_fakes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using testing::failure_of;
using testing::FakeGroup;
using testing::GroupCall;
using ::testing::HasSubstr;
using testing::PeersFormula;
using testing::require;
using torch::Tensor;

std::shared_ptr<PeersFormula> formula_of_four() {
  return std::make_shared<PeersFormula>(4);
}

// Runs five collectives, which together reduce a tensor of ones twice. Returns the result of rank
// 0.
Tensor run_collectives(const ProcessGroup& group) {
  const Tensor tensor = torch::ones({3}, torch::kDouble);
  group.all_reduce(tensor);
  group.all_reduce_async(tensor, {.op = ReduceOp::kAvg}).wait();
  group.broadcast(tensor);
  const Tensor gathered =
      SymmetricTensor::allocate(group, 3 * group.world_size(), at::kDouble).local();
  group.all_gather(gathered, tensor);
  return gathered.narrow(0, 0, 3);
}

void expect_all(const Tensor& tensor, double value) {
  EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, value))) << tensor;
}

// Only rank 0 exists in a group of formula_of_four(). The fake group computes the contributions of
// ranks 1, 2 and 3 as 2, 3 and 4 times rank 0's values.
TEST(FakeGroup, AFormulaIsTheOtherRanks) {
  const FakeGroup fake(formula_of_four());
  EXPECT_EQ(fake.group().world_size(), 4);
  expect_all(run_collectives(fake.group()), 10 * 2.5);
  EXPECT_THAT(fake.log(),
              ElementsAre("all_reduce(sum, float64 x 3)", "all_reduce(avg, float64 x 3)",
                          "broadcast(float64 x 3, root 0)", "allocate_symmetric(uint8 x 96)",
                          "all_gather(float64 x 3)"));
  EXPECT_EQ(fake.num_allocated(), 1);
  const Tensor count = torch::ones({2}, torch::kInt);
  fake.group().all_reduce(count);
  expect_all(count, 4);
  const auto parts =
      SymmetricTensor::allocate(fake.group(), 1024, at::kFloat, {.with_whole = true});
  EXPECT_FALSE(parts.has_whole()) << "it shares no memory";
}

TEST(FakeGroup, AFormulaReducesInTheWait) {
  const FakeGroup fake(formula_of_four());
  const Tensor tensor = torch::ones({3});
  const Work work = fake.group().all_reduce_async(tensor);
  fake.group().communicator().system().make_waiter()->park(
      fake.group().communicator().system().deadline_in(std::chrono::milliseconds(20)));
  expect_all(tensor, 1);
  work.wait();
  expect_all(tensor, 10);
}

// Rank 0 passes 0, 1, 2, ... to the reduce_scatter; the other ranks' values are 2, 3 and 4 times
// these. The result must appear only in wait().
TEST(FakeGroup, AFormulaGathersAndScattersInTheWait) {
  const FakeGroup fake(formula_of_four());
  const ProcessGroup group = fake.group();
  const Tensor gathered = torch::zeros({8});
  const Work gather = group.all_gather_async(gathered, torch::arange(1.0, 3.0));
  expect_all(gathered, 0);
  gather.wait();
  EXPECT_TRUE(torch::equal(gathered, torch::tensor({1.0, 2.0}).repeat({4})));
  const Tensor input = torch::arange(8.0);
  const Tensor output = torch::zeros({2});
  const Work scatter = group.reduce_scatter_async(output, input);
  expect_all(output, 0);
  scatter.wait();
  EXPECT_TRUE(torch::equal(output, torch::tensor({0.0, 10.0})));
  EXPECT_TRUE(torch::equal(input, torch::arange(8.0)));
}

TEST(FakeGroup, AnyCollectiveIsDroppedOrChanged) {
  const FakeGroup fake(formula_of_four());
  fake.on_call = [](GroupCall& call) {
    if (call.number != 2) call.pass_on();
  };
  expect_all(run_collectives(fake.group()), 10);
  for (const uint64_t number : {1, 2}) {
    const FakeGroup other(formula_of_four());
    other.on_call = [number](GroupCall& call) {
      if (call.number == number) {
        call.reduce_with(number == 1 ? ReduceOp::kAvg : ReduceOp::kSum);
        call.output.fill_(2);
      }
      call.pass_on();
    };
    expect_all(run_collectives(other.group()), number == 1 ? 2 * 2.5 * 2.5 : 2 * 10.0);
  }
}

TEST(FakeGroup, AnyCollectiveFails) {
  for (const uint64_t number : {1, 2, 3, 4, 5}) {
    const FakeGroup fake(formula_of_four());
    fake.on_call = [number](GroupCall& call) {
      if (call.number == number) throw Error(ErrorCode::kPeerLost, "rank 2 is gone");
      call.pass_on();
    };
    EXPECT_THAT(failure_of([&] { run_collectives(fake.group()); }), HasSubstr("rank 2 is gone"));
  }
}

TEST(FakeGroup, AnAsynchronousCollectiveFailsInItsWait) {
  const FakeGroup fake(formula_of_four());
  fake.on_call = [](GroupCall&) { throw Error(ErrorCode::kPeerLost, "rank 2 is gone"); };
  const Work work = fake.group().all_reduce_async(torch::ones({3}));
  EXPECT_THAT(failure_of([&] { work.wait(); }), HasSubstr("rank 2 is gone"));
}

TEST(FakeGroup, ItsGroupOutlivesIt) {
  int num_calls = 0;
  const auto make = [&num_calls] {
    const FakeGroup fake(formula_of_four());
    fake.on_call = [&num_calls](GroupCall& call) {
      ++num_calls;
      call.pass_on();
    };
    return fake.group();
  };
  expect_all(run_collectives(make()), 10 * 2.5);
  EXPECT_EQ(num_calls, 5);
}

TEST(FakeGroup, OverARealGroupCollectivesArriveAndMayBeLate) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& real) {
    const FakeGroup fake(real);
    const ProcessGroup group = fake.group();
    std::vector<OpKind> kinds;
    fake.on_call = [&](GroupCall& call) {
      kinds.push_back(call.kind);
      call.pass_on();
    };
    require(group.rank() == real.rank() && group.world_size() == 2, "the group's rank and size");
    require(torch::equal(run_collectives(group), torch::full({3}, 2.0, torch::kDouble)),
            "sum, then mean");
    require(kinds == std::vector{OpKind::kAllReduce, OpKind::kAllReduce, OpKind::kBroadcast,
                                 OpKind::kAllocate, OpKind::kAllGather},
            "each collective is seen once");
    fake.on_call = [&fake](GroupCall& call) { fake.delay(call); };
    const Tensor tensor = torch::full({3}, group.rank() + 1.0);
    const Work work = group.all_reduce_async(tensor);
    require(torch::equal(tensor, torch::full({3}, group.rank() + 1.0)), "not yet");
    work.wait();
    require(torch::equal(tensor, torch::full({3}, 3.0)), "the sum of both ranks");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FakeGroup, ARealGroupKeepsTheMemoryThatItsRanksShare) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& real) {
    const FakeGroup fake(real);
    require(fake.group().communicator().shares_memory(), "as the real one");
    const auto parts =
        SymmetricTensor::allocate(fake.group(), 1024, at::kFloat, {.with_whole = true});
    require(parts.has_whole(), "it is mapped");
    parts.local().fill_(real.rank() + 1);
    fake.group().barrier();
    for (int rank = 0; rank < 2; ++rank) {
      const Tensor part = parts.whole().narrow(0, rank * 1024, 1024);
      require(torch::equal(part, torch::full({1024}, rank + 1.0F)), "each rank's part");
    }
    fake.group().barrier();
    require(fake.num_allocated() == 1, "seen");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A real group, a LocatedGroup and a FakeGroup around the real one must give the same results. Each
// rank has the values rank + 1 and 10 (rank + 1). Input and output are separate tensors, or the
// smaller one is this rank's slice of the larger one.
TEST(FakeGroup, GathersAndScattersOfARealGroup) {
  for (const int world_size : {1, 2, 3}) {
    const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
      const FakeGroup fake(group);
      const wrap::LocatedGroup located(fake.group(), {.wrapper = "Wrapper", .module = "Net"});
      const double mine = group.rank() + 1;
      Tensor expected = torch::empty({world_size * 2});
      for (int rank = 0; rank < world_size; ++rank) {
        expected[2 * rank] = rank + 1;
        expected[2 * rank + 1] = 10 * (rank + 1);
      }
      const Tensor part = torch::tensor({mine, 10 * mine});
      for (const bool in_place : {false, true}) {
        const Tensor whole = torch::zeros({world_size * 2});
        const Tensor own = whole.narrow(0, 2 * group.rank(), 2);
        own.copy_(part);
        located.all_gather_async(whole, in_place ? own : part)();
        require(torch::equal(whole, expected), "gathered");
        located.reduce_scatter_async(in_place ? own : part, whole, ReduceOp::kSum)();
        require(torch::equal(in_place ? own : part, torch::tensor({mine, 10 * mine}) * world_size),
                "reduced");
        part.copy_(torch::tensor({mine, 10 * mine}));
      }
      const std::string sizes =
          failure_of([&] { located.all_gather_async(torch::zeros({2 * world_size + 1}), part); });
      require(sizes.find("expected world size") != std::string::npos, sizes);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// The error for a mismatch of collectives must name the step of this rank, also if the wait of an
// asynchronous call throws it.
TEST(FakeGroup, AMismatchOfAnAsynchronousCallIsLocated) {
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    const wrap::LocatedGroup located(group, {.wrapper = "Wrapper", .module = "Net"});
    located.enter({"its step {}", 7});
    const std::string failure = failure_of([&] {
      if (group.rank() == 0) located.all_gather_async(torch::zeros({4}), torch::zeros({2}))();
      if (group.rank() == 1) {
        located.reduce_scatter_async(torch::zeros({2}), torch::zeros({4}), ReduceOp::kSum)();
      }
    });
    require(failure.find("Wrapper of Net, rank " + std::to_string(group.rank()) +
                         ", in its step 7") != std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
