// Tests a Communicator whose engine is supplied by the program (CommunicatorOptions::backend), and
// the functions of the fake engine.
#include "cadre/testing/core/fake_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Duration kPatience = std::chrono::seconds(20);

CommunicatorOptions options_with(BackendFactory backend) {
  CommunicatorOptions options;
  options.timeout = kPatience;
  options.backend = std::move(backend);
  return options;
}

using Body = std::function<void(Communicator&)>;

RanksResult run_group(int world_size, const CommunicatorOptions& options, const Body& body) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return run_ranks_as_threads(world_size, [&](RankContext& context) {
    const Membership membership{context.rank, world_size, 1, store, "token"};
    const auto group = Communicator::connect(context.system, membership, options,
                                             context.system.deadline_in(kPatience));
    body(*group);
    group->close(context.system.deadline_in(kPatience));
  });
}

float sum_over(Communicator& group, float value, Reduction reduction = ReduceOp::kSum) {
  const Bytes data = std::as_writable_bytes(std::span(&value, 1));
  group.all_reduce(data, data, DType::kFloat32, reduction);
  return value;
}

TEST(FakeBackendTest, RunsBlockingAndIssuedCollectivesInOrder) {
  const auto calls = std::make_shared<FakeCalls>();
  const auto options = options_with(fake_backend(std::make_shared<RanksInProcess>(), calls));
  const auto result = run_group(3, options, [](Communicator& group) {
    require(group.backend_name() == "fake" && !group.shares_memory(), "another engine was made");
    const auto rank = static_cast<float>(group.rank().value);
    require(sum_over(group, rank + 1) == 6, "the sum is wrong");
    float first = rank;
    float second = rank;
    const Bytes one = std::as_writable_bytes(std::span(&first, 1));
    const Bytes two = std::as_writable_bytes(std::span(&second, 1));
    const Work sum = group.all_reduce_async(one, one, DType::kFloat32, ReduceOp::kSum);
    const Work maximum = group.all_reduce_async(two, two, DType::kFloat32, ReduceOp::kMax);
    maximum.wait();
    require(sum.is_completed(), "a later collective overtook an earlier one");
    sum.wait();
    require(first == 3 && second == 2, "an issued collective is wrong");
    require(group.num_collectives() == 3, "collectives were not numbered");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(calls->log().size(), 9u);
  EXPECT_EQ(calls->log().front(), "all_reduce(sum, float32 x 1)");
}

TEST(FakeBackendTest, GroupsThatAreSplitOffHaveEnginesOfTheSameFactory) {
  const auto options = options_with(fake_backend(std::make_shared<RanksInProcess>()));
  const auto result = run_group(4, options, [](Communicator& group) {
    const int color = group.rank().value % 2;
    const auto half = split(group, {.color = color, .name = format("half {}", color)},
                            group.system().deadline_in(kPatience));
    require(half->backend_name() == "fake", "the new group has another engine");
    const float sum = sum_over(*half, static_cast<float>(group.rank().value));
    require(sum == (color == 0 ? 2 : 4), "the sum of the new group is wrong");
    half->close(group.system().deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FakeBackendTest, AStoreOfItsOwnConnectsTheRanksOfAFactory) {
  const auto peers = std::make_shared<RanksInProcess>();
  const BackendFactory factory =
      [peers](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    if (setup.rank == 0) CADRE_RETURN_IF_ERROR(setup.store->set("id", "7", setup.deadline));
    const auto id = setup.store->get("id", setup.deadline);
    if (!id.ok()) return id.error();
    const auto keys = setup.store->list_keys(setup.deadline);
    if (!keys.ok()) return keys.error();
    if (*id != "7" || keys->size() != 1) return Error(ErrorCode::kInternal, "a foreign key");
    return fake_backend(peers)(setup);
  };
  const auto result = run_group(2, options_with(factory), [](Communicator& group) {
    require(sum_over(group, 1) == 2, "the sum is wrong");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FakeBackendTest, AFactoryThatFailsOnOneRankFailsTheGroup) {
  const auto peers = std::make_shared<RanksInProcess>();
  const BackendFactory factory =
      [peers](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    if (setup.rank == 1) return Error(ErrorCode::kUnavailable, "the library is not installed");
    return fake_backend(peers)(setup);
  };
  const auto result = run_group(2, options_with(factory),
                                [](Communicator& group) { static_cast<void>(sum_over(group, 1)); });
  EXPECT_THAT(result.ranks[1].failure, HasSubstr("kUnavailable"));
  EXPECT_THAT(result.ranks[1].failure, HasSubstr("the library is not installed"));
  EXPECT_THAT(result.ranks[0].failure, HasSubstr("rank 1"));
  EXPECT_THAT(result.ranks[0].failure, HasSubstr("the library is not installed"));
}

class FewCapabilities final : public Backend {
 public:
  explicit FewCapabilities(std::unique_ptr<Backend> engine) : engine_(std::move(engine)) {}
  Capabilities capabilities() const override {
    Capabilities can = engine_->capabilities();
    can.name = "few";
    can.kinds.erase(OpKind::kAllToAll);
    can.dtypes.erase(DType::kBfloat16);
    can.reductions[static_cast<size_t>(DType::kFloat32)].erase(ReduceOp::kAvg);
    return can;
  }
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    return engine_->submit(op, collectives);
  }

 private:
  const std::unique_ptr<Backend> engine_;
};

TEST(FakeBackendTest, WhatAnEngineDoesNotSupportIsRefusedBeforeItIsNumbered) {
  const auto calls = std::make_shared<FakeCalls>();
  const auto fake = fake_backend(std::make_shared<RanksInProcess>(), calls);
  const BackendFactory few = [fake](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    auto engine = fake(setup);
    if (!engine.ok()) return engine.error();
    return std::unique_ptr<Backend>(std::make_unique<FewCapabilities>(std::move(*engine)));
  };
  const auto result = run_group(2, options_with(few), [](Communicator& group) {
    std::vector<std::byte> in(16);
    std::vector<std::byte> out(16);
    const auto expect = [&](Collective c, std::string_view problem) {
      const std::string text = failure_of([&] { group.run(c); });
      const std::string begin = format("kInvalidArgument: {} on group \"world\", rank {}: {}",
                                       c.kind, group.rank(), problem);
      require(text.starts_with(begin), text);
    };
    expect(Collective::all_to_all(in, out, DType::kFloat32),
           "backend \"few\" does not have this operation");
    expect(Collective::all_reduce(in, out, DType::kBfloat16, ReduceOp::kSum),
           "backend \"few\" does not move bfloat16");
    expect(Collective::all_reduce(in, out, DType::kFloat32, ReduceOp::kAvg),
           "backend \"few\" does not compute avg of float32");
    Collective on_device = Collective::all_reduce(in, out, DType::kFloat32, ReduceOp::kSum);
    on_device.device = {DeviceType::kCuda, 0};
    expect(on_device, "the buffers are on cuda:0");
    require(group.num_collectives() == 0, "a refused collective was numbered");
    require(sum_over(group, 1) == 2, "the group is unusable after the errors");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(calls->log().size(), 2u);
}

TEST(FakeBackendTest, AMismatchIsReportedOnAllRanksWithBothCalls) {
  const auto options = options_with(fake_backend(std::make_shared<RanksInProcess>()));
  const auto result = run_group(2, options, [](Communicator& group) {
    if (group.rank() == 0) return group.barrier();
    static_cast<void>(sum_over(group, 1));
  });
  for (const RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.failure, HasSubstr("kInvalidArgument"));
    EXPECT_THAT(rank.failure, HasSubstr("barrier()"));
    EXPECT_THAT(rank.failure, HasSubstr("all_reduce(sum, float32 x 1)"));
  }
}

TEST(FakeBackendTest, ARankThatDoesNotComeIsNamedByATimeout) {
  auto options = options_with(fake_backend(std::make_shared<RanksInProcess>()));
  options.timeout = std::chrono::milliseconds(300);
  const auto result = run_group(2, options, [](Communicator& group) {
    if (group.rank() == 1) return;
    const std::string failure = failure_of([&] { group.barrier(); });
    require(failure.find("rank 1") != std::string::npos, "rank 1 is not named: " + failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Returns an on_call function that calls `what` for one collective of one rank, and pass_on() for
// all other collectives.
FakeCalls::OnCall on(Rank rank, uint64_t number, const FakeCalls::OnCall& what) {
  return [=](FakeCall& call) {
    return call.rank == rank && call.number == number ? what(call) : call.pass_on();
  };
}

TEST(FakeBackendTest, AnyCollectiveCanBeCountedDroppedChangedOrDelayed) {
  const auto system = os::make_native_system();
  std::atomic<int> num_calls{0};
  const auto calls = std::make_shared<FakeCalls>([&](FakeCall& call) -> Status {
    ++num_calls;
    if (call.number == 2) return {};
    if (call.number == 3) call.collective.reduction = ReduceOp::kMax;
    if (call.number == 4) {
      system->make_waiter()->park(system->deadline_in(std::chrono::milliseconds(20)));
    }
    return call.pass_on();
  });
  const auto options = options_with(fake_backend(std::make_shared<RanksInProcess>(), calls));
  const auto result = run_group(2, options, [](Communicator& group) {
    const auto value = static_cast<float>(group.rank().value + 1);
    require(sum_over(group, value) == 3, "collective 1 was changed");
    require(sum_over(group, value) == value, "collective 2 was not dropped");
    require(sum_over(group, value) == 2, "collective 3 was not changed");
    require(sum_over(group, value) == 3, "collective 4 was not passed on");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(num_calls, 8);
}

TEST(FakeBackendTest, AFailedCollectiveIsTheFailureOfTheGroup) {
  const auto calls = std::make_shared<FakeCalls>(on(1, 2, [](FakeCall&) -> Status {
    return Error(ErrorCode::kUnavailable, "the link is down");
  }));
  const auto options = options_with(fake_backend(std::make_shared<RanksInProcess>(), calls));
  const auto result = run_group(2, options, [](Communicator& group) {
    require(sum_over(group, 1) == 2, "collective 1 was changed");
    static_cast<void>(sum_over(group, 1));
  });
  for (const RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.failure, HasSubstr("the link is down"));
    EXPECT_THAT(rank.failure, HasSubstr("#2"));
  }
}

TEST(FakeBackendTest, AFormulaIsTheOtherRanksOfALoneGroup) {
  const auto system = os::make_native_system();
  const auto calls = std::make_shared<FakeCalls>();
  const auto group = make_lone_group(
      *system, 4, options_with(fake_backend(std::make_shared<FormulaPeers>(), calls)));
  EXPECT_EQ(group->world_size(), 4);
  EXPECT_EQ(sum_over(*group, 1), 10);
  EXPECT_EQ(sum_over(*group, 1, ReduceOp::kAvg), 2.5);
  EXPECT_EQ(sum_over(*group, 1, Reduction::premul_sum(2)), 20);
  const std::vector<int32_t> mine = {5, 6};
  std::vector<int32_t> all(8);
  group->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                    DType::kInt32);
  EXPECT_THAT(all, ElementsAre(5, 6, 5, 6, 5, 6, 5, 6));
  std::vector<float> parts = {1, 2, 3, 4};
  group->reduce_scatter(std::as_bytes(std::span(parts)),
                        std::as_writable_bytes(std::span(parts)).first(4), DType::kFloat32,
                        ReduceOp::kSum);
  EXPECT_EQ(parts[0], 10);
  const auto buffer = group->allocate_symmetric(16);
  EXPECT_FALSE(buffer->shares_memory());
  EXPECT_THAT(calls->log(),
              ElementsAre("all_reduce(sum, float32 x 1)", "all_reduce(avg, float32 x 1)",
                          "all_reduce(premul_sum, float32 x 1)", "all_gather(int32 x 2)",
                          "reduce_scatter(sum, float32 x 1)", "allocate_symmetric(uint8 x 16)"));
  EXPECT_THAT(failure_of([&] {
                group->all_to_all_v({}, {}, DType::kInt32, {{0, 0, 0, 0}, {0, 0, 0, 0}});
              }),
              HasSubstr("backend \"fake\" does not have this operation"));
  group->close(system->deadline_in(kPatience));
}

}  // namespace
}  // namespace cadre::testing
