// The fake group does what tests of wrappers rely on: it passes calls on unchanged, and any single
// call can be dropped, changed, delayed or failed.
#include "cadre/wrap/replica_group_fakes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/group/process_group_test_ranks.h"
#include "cadre/wrap/located_replicas.h"

namespace cadre {
namespace {

using testing::delay;
using testing::FakeReplicas;
using testing::GroupCall;
using testing::PeersFormula;
using testing::require;
using torch::Tensor;
using Kind = testing::GroupCall::Kind;

// Five calls, which reduce a tensor of ones twice; returns what rank 0 has of it in the end.
Tensor run_calls(ReplicaGroup& group) {
  const Tensor tensor = torch::ones({3}, torch::kDouble);
  group.all_reduce(tensor, ReduceOp::kSum);
  const auto wait = group.all_reduce_async(tensor, ReduceOp::kAvg);
  wait();
  group.broadcast(tensor, 0);
  const Tensor gathered = group.empty_flat(3 * group.world_size(), at::kDouble);
  group.all_gather(gathered, tensor);
  return gathered.narrow(0, 0, 3);
}

std::shared_ptr<FakeReplicas> make_fake() {
  return std::make_shared<FakeReplicas>(std::make_shared<PeersFormula>(4));
}

void expect_all(const Tensor& tensor, double value) {
  EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, value))) << tensor;
}

// Ranks have 1, 2, 3 and 4 times what rank 0 has.
TEST(FakeReplicas, AFormulaIsTheOtherRanks) {
  const auto fake = make_fake();
  expect_all(run_calls(*fake), 10 * 2.5);
  EXPECT_THAT(fake->log, ::testing::ElementsAre("all_reduce 3", "all_reduce 3", "broadcast 3",
                                                "all_gather 3"));
  EXPECT_EQ(fake->num_allocated, 1);
  EXPECT_EQ(fake->num_waited, 2);
  const Tensor count = torch::ones({2}, torch::kInt);
  fake->all_reduce(count, ReduceOp::kSum);
  expect_all(count, 4);
}

TEST(FakeReplicas, AFormulaReducesInTheWait) {
  const auto fake = make_fake();
  const Tensor tensor = torch::ones({3});
  const auto wait = fake->all_reduce_async(tensor, ReduceOp::kSum);
  expect_all(tensor, 1);
  wait();
  expect_all(tensor, 10);
}

// Rank 0 has 1, 2, 3, 4 for itself and twice, three and four times that from the others.
TEST(FakeReplicas, AFormulaGathersAndScattersInTheWait) {
  const auto fake = make_fake();
  const Tensor gathered = torch::zeros({8});
  const auto wait_gathered = fake->all_gather_async(gathered, torch::arange(1.0, 3.0));
  expect_all(gathered, 0);
  wait_gathered();
  EXPECT_TRUE(torch::equal(gathered, torch::tensor({1.0, 2.0}).repeat({4})));
  const Tensor input = torch::arange(8.0);
  const Tensor output = torch::zeros({2});
  const auto wait_scattered = fake->reduce_scatter_async(output, input, ReduceOp::kSum);
  expect_all(output, 0);
  wait_scattered();
  EXPECT_TRUE(torch::equal(output, torch::tensor({0.0, 10.0})));
  EXPECT_TRUE(torch::equal(input, torch::arange(8.0)));
  EXPECT_THAT(fake->log, ::testing::ElementsAre("all_gather 2", "reduce_scatter 2"));
  EXPECT_EQ(fake->num_waited, 2);
}

TEST(FakeReplicas, AnyCallIsDroppedOrChanged) {
  const auto fake = make_fake();
  fake->on_call = [](GroupCall& call) {
    if (call.number != 2) call.pass_on();
  };
  expect_all(run_calls(*fake), 10);
  for (const int64_t number : {1, 2}) {
    const auto other = make_fake();
    other->on_call = [number](GroupCall& call) {
      if (call.number == number) {
        call.op = number == 1 ? ReduceOp::kAvg : ReduceOp::kSum;
        call.tensor.fill_(2);
      }
      call.pass_on();
    };
    expect_all(run_calls(*other), number == 1 ? 2 * 2.5 * 2.5 : 2 * 10.0);
  }
}

TEST(FakeReplicas, AnyCallFails) {
  for (const int64_t number : {1, 2, 3, 4, 5}) {
    const auto fake = make_fake();
    fake->on_call = [number](GroupCall& call) {
      if (call.number == number) throw Error(ErrorCode::kPeerLost, "rank 2 is gone");
      call.pass_on();
    };
    EXPECT_THAT(testing::failure_of([&] { run_calls(*fake); }),
                ::testing::HasSubstr("rank 2 is gone"));
  }
}

TEST(FakeReplicas, AReductionFailsInItsWait) {
  const auto fake = make_fake();
  fake->on_call = [](GroupCall& call) {
    call.wait = [] { throw Error(ErrorCode::kPeerLost, "rank 2 is gone"); };
  };
  const auto wait = fake->all_reduce_async(torch::ones({3}), ReduceOp::kSum);
  EXPECT_THAT(testing::failure_of(wait), ::testing::HasSubstr("rank 2 is gone"));
}

TEST(FakeReplicas, OverARealGroupCallsArriveAndMayBeLate) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& group) {
    FakeReplicas fake(group);
    std::vector<Kind> kinds;
    fake.on_call = [&](GroupCall& call) {
      kinds.push_back(call.kind);
      call.pass_on();
    };
    require(fake.rank() == group.rank() && fake.world_size() == 2, "the group's rank and size");
    require(torch::equal(run_calls(fake), torch::full({3}, 2.0, torch::kDouble)), "sum, then mean");
    require(kinds == std::vector{Kind::kAllReduce, Kind::kAllReduceAsync, Kind::kBroadcast,
                                 Kind::kEmptyFlat, Kind::kAllGather},
            "each call is seen once");
    const uint64_t before = fake.num_operations();
    fake.on_call = [](GroupCall& call) { delay(call); };
    const Tensor tensor = torch::full({3}, group.rank() + 1.0);
    const auto wait = fake.all_reduce_async(tensor, ReduceOp::kSum);
    require(fake.num_operations() == before, "not issued yet");
    wait();
    require(fake.num_operations() == before + 1, "issued by the wait");
    require(torch::equal(tensor, torch::full({3}, 3.0)), "the sum of both ranks");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// What the real group, the located one and the fake one do is the same: each rank has rank + 1 and
// 10 (rank + 1), both where the parts lie apart and where this rank's is a part of the whole.
TEST(FakeReplicas, GathersAndScattersOfARealGroup) {
  for (const int world_size : {1, 2, 3}) {
    const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
      const auto fake = std::make_shared<FakeReplicas>(group);
      LocatedReplicas located(fake, {.wrapper = "Wrapper", .module = "Net"});
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
      const std::string sizes = testing::failure_of(
          [&] { located.all_gather_async(torch::zeros({2 * world_size + 1}), part); });
      require(sizes.find("expected world size") != std::string::npos, sizes);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A mismatch says in whose step the ranks were, also in the wait of an asynchronous call.
TEST(FakeReplicas, AMismatchOfAnAsynchronousCallIsLocated) {
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    LocatedReplicas located(make_replica_group(group), {.wrapper = "Wrapper", .module = "Net"});
    located.enter({"its step {}", 7});
    const std::string failure = testing::failure_of([&] {
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
