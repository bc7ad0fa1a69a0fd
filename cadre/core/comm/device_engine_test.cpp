// Tests groups that have an engine for memory of a device beside the one for memory of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/abandoned_memory.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/fake_stream_backend.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::connect_ranks;
using testing::failed_fields_of;
using testing::failure_of;
using testing::FakeEvent;
using testing::FakeStream;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::RanksInProcess;
using testing::require;

constexpr Duration kPatience = seconds(20);

// Each rank has a device of its own. The engine cannot abort a call, so it uses the System of the
// process.
CommunicatorOptions with_device(const std::shared_ptr<RanksInProcess>& peers, Rank rank) {
  const BackendFactory make = [inner = testing::fake_stream_backend(peers)](const BackendSetup& s) {
    return inner({.rank = s.rank,
                  .world_size = s.world_size,
                  .device = s.device,
                  .group = s.group,
                  .store = s.store,
                  .interrupt = s.interrupt,
                  .system = testing::process_system(),
                  .deadline = s.deadline});
  };
  CommunicatorOptions options{.timeout = kPatience};
  options.device_backend = {.device = {DeviceType::kPrivateUse1, rank.value}, .make = make};
  return options;
}

// Calls a function of the test before each submit() of the engine.
class HookedEngine final : public Backend {
 public:
  using Hook = std::function<Status(const BackendSetup& setup, const OpContext& op)>;

  HookedEngine(std::unique_ptr<Backend> inner, const BackendSetup& setup, Hook hook)
      : inner_(std::move(inner)), setup_(setup), hook_(std::move(hook)) {}

  Capabilities capabilities() const override { return inner_->capabilities(); }
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    CADRE_RETURN_IF_ERROR(hook_(setup_, op));
    return inner_->submit(op, collectives);
  }

 private:
  const std::unique_ptr<Backend> inner_;
  const BackendSetup setup_;
  const Hook hook_;
};

CommunicatorOptions with_hooked_device(const std::shared_ptr<RanksInProcess>& peers, Rank rank,
                                       const HookedEngine::Hook& hook) {
  CommunicatorOptions options = with_device(peers, rank);
  options.device_backend->make =
      [make = options.device_backend->make,
       hook](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    auto inner = make(setup);
    if (!inner.ok()) return inner.error();
    return std::unique_ptr<Backend>(
        std::make_unique<HookedEngine>(std::move(inner).value(), setup, hook));
  };
  return options;
}

Collective sum_of(float& value) {
  const Bytes data = std::as_writable_bytes(std::span(&value, 1));
  return Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
}

Collective device_sum_of(float& value, const Communicator& group, FakeStream& stream) {
  Collective collective = sum_of(value);
  collective.device = *group.device();
  collective.after = stream.point();
  return collective;
}

testing::RanksResult run(int num_ranks, const testing::RankMain& body) {
  return testing::run_ranks_as_threads(num_ranks, body);
}

// Both engines run calls of one group, which has one numbering, and neither blocks the other.
TEST(DeviceEngineTest, CallsOnBothKindsOfMemoryAlternate) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(2, [&](RankContext& context) {
    const auto group = connect_ranks(context, with_device(peers, context.rank));
    require(group->device() == Device{DeviceType::kPrivateUse1, context.rank.value}, "device");
    require(group->backend_name() == "host", "the engine for the CPU is the native one");
    FakeStream stream(context.system);
    const FakeStream::Current current(stream);
    for (int round = 0; round < 50; ++round) {
      float on_cpu = static_cast<float>(context.rank.value + 1);
      float on_device = 0;
      float seen = 0;
      stream.enqueue([&] { on_device = static_cast<float>(10 * (context.rank.value + 1)); });
      const Work first = group->issue(device_sum_of(on_device, *group, stream));
      group->run(sum_of(on_cpu));
      const Work second = group->issue(device_sum_of(on_device, *group, stream));
      const Work third = group->issue(sum_of(on_cpu));
      first.wait();
      second.wait();
      stream.enqueue([&] { seen = on_device; });
      third.wait();
      require(on_cpu == 6, "the sum of sums on the CPU");
      require(stream.synchronize(context.system.deadline_in(kPatience)), "the stream has ended");
      require(seen == 60, "the sum of sums on the device");
    }
    require(group->num_collectives() == 200, "one numbering");
    group->close(context.system.deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The status page shows an enqueued call while the rank is in a later one on the CPU. When ranks
// leave, they compare their last calls, whichever engine has run them and however fast.
TEST(DeviceEngineTest, RanksThatLeaveCompareTheirLastCallsOnBothKindsOfMemory) {
  const auto log = std::make_shared<testing::LogLines>();
  for (const bool ends_on_cpu : {true, false}) {
    for (int round = 0; round < 20; ++round) {
      const auto peers = std::make_shared<RanksInProcess>();
      const auto result = run(2, [&](RankContext& context) {
        CommunicatorOptions options = with_device(peers, context.rank);
        options.log = log;
        const auto group = connect_ranks(context, options);
        FakeStream stream(context.system);
        FakeEvent gate(context.system);
        float values[3] = {1, 1, 1};
        stream.enqueue([&] { gate.wait(context.system.deadline_in(kPatience)); });
        const Work first = group->issue(device_sum_of(values[0], *group, stream));
        // One of the ranks makes its last call behind a held stream, the other one behind none.
        if (context.rank.value == 0) gate.set();
        if (context.rank.value == 0)
          require(stream.synchronize(context.system.deadline_in(kPatience)), "");
        std::optional<Work> last;
        if (ends_on_cpu) {
          last = group->issue(sum_of(values[1]));
        } else {
          last = group->issue(device_sum_of(values[2], *group, stream));
        }
        gate.set();
        const FakeStream::Current current(stream);
        first.wait();
        last->wait();
        require(stream.synchronize(context.system.deadline_in(kPatience)), "the stream has ended");
        group->close(context.system.deadline_in(kPatience));
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
  EXPECT_THAT(log->get(), ::testing::IsEmpty());
}

// The engine of the device is not asked before the call's own work, and wait() orders the stream
// that is current in the waiting thread.
TEST(DeviceEngineTest, AWaitOrdersAnotherStreamThanThatOfTheIssue) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(2, [&](RankContext& context) {
    const auto group = connect_ranks(context, with_device(peers, context.rank));
    FakeStream issuing(context.system);
    FakeStream waiting(context.system);
    FakeEvent gate(context.system);
    float value = 0;
    float seen = 0;
    issuing.enqueue([&] {
      gate.wait(context.system.deadline_in(kPatience));
      value = 3;
    });
    const Work work = group->issue(device_sum_of(value, *group, issuing));
    {
      const FakeStream::Current current(waiting);
      work.wait();
    }
    require(!work.is_completed(), "wait() does not block the host");
    waiting.enqueue([&] { seen = value; });
    require(!waiting.synchronize(context.system.deadline_in(milliseconds(20))), "it is ordered");
    gate.set();
    require(waiting.synchronize(context.system.deadline_in(kPatience)), "the stream has ended");
    require(seen == 6, "the sum");
    group->close(context.system.deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceEngineTest, RefusesWhatIsNotOnTheDeviceOfTheRank) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(1, [&](RankContext& context) {
    const auto group = connect_ranks(context, with_device(peers, context.rank));
    FakeStream stream(context.system);
    float value = 1;
    Collective elsewhere = device_sum_of(value, *group, stream);
    elsewhere.device.index = 7;
    context.output = failure_of([&] { group->run(elsewhere); });
    const std::vector<Collective> mixed = {sum_of(value), device_sum_of(value, *group, stream)};
    context.output += "\n" + failure_of([&] { group->run(mixed); });
    require(may_use_memory_after_return(*group, DeviceType::kPrivateUse1), "it is enqueued");
    require(!may_use_memory_after_return(*group, DeviceType::kCpu), "a copy has ended");
    require(group->num_collectives() == 0, "no call got a number");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output,
            "kInvalidArgument: all_reduce on group \"world\", rank 0: the buffers are on "
            "privateuseone:7, but this rank's device in the group is privateuseone:0; move them "
            "there, or connect the group with the other device\n"
            "kInvalidArgument: all_reduce on group \"world\", rank 0: collective 1 of the call "
            "(all_reduce) has buffers on privateuseone:0, the first one on cpu; pass those of each "
            "device in a call of their own");
}

TEST(DeviceEngineTest, RefusesOptionsWithoutADeviceOrAFactory) {
  const auto result = run(1, [&](RankContext& context) {
    CommunicatorOptions options;
    options.device_backend = {.device = {DeviceType::kCuda, 0}};
    context.output = failure_of([&] { connect_ranks(context, options); });
    options.device_backend = {.make =
                                  testing::fake_stream_backend(std::make_shared<RanksInProcess>())};
    context.output += "\n" + failure_of([&] { connect_ranks(context, options); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output, HasSubstr("the options have no factory as their"));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("the options have the CPU as their"));
}

TEST(DeviceEngineTest, RanksWithoutADeviceAreNamedOnAllRanks) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(3, [&](RankContext& context) {
    CommunicatorOptions options = with_device(peers, context.rank);
    if (context.rank == 1) options.device_backend.reset();
    context.output = failure_of([&] { connect_ranks(context, options); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, ::testing::StartsWith("kInvalidArgument: "));
    EXPECT_THAT(rank.output,
                HasSubstr("the ranks have devices of different types: none on ranks 1; "
                          "privateuseone on ranks 0, 2. Let every rank have a device of one "
                          "type, or pass the CPU on all ranks"));
  }
}

// The time for the engine is that of connecting or splitting, and not the timeout of operations.
TEST(DeviceEngineTest, EnginesAreMadeUntilTheDeadlineOfTheCall) {
  const auto result = run(2, [&](RankContext& context) {
    std::vector<Deadline> deadlines;
    CommunicatorOptions options = with_device(std::make_shared<RanksInProcess>(), context.rank);
    options.timeout = seconds(5);
    options.device_backend->make = [&, make = options.device_backend->make](const auto& setup) {
      deadlines.push_back(setup.deadline);
      return make(setup);
    };
    const TimePoint now = context.system.now();
    const auto group = connect_ranks(context, options);
    const auto both = split(*group, {.color = 0}, context.system.deadline_in(seconds(900)));
    require(deadlines.size() == 2, "two engines");
    require(deadlines[0].at() - now >= testing::kRankTimeout, "the deadline of connecting");
    require(deadlines[1].at() - now >= seconds(900), "the deadline of split");
    both->close(context.system.deadline_in(kPatience));
    group->close(context.system.deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DeviceEngineTest, GroupsThatAreSplitOffHaveTheEngineToo) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(4, [&](RankContext& context) {
    const auto world = connect_ranks(context, with_device(peers, context.rank));
    const auto half = split(
        *world, {.color = context.rank.value / 2, .name = context.rank.value < 2 ? "low" : "high"},
        context.system.deadline_in(kPatience));
    require(half->device() == world->device(), "the device of the rank");
    FakeStream stream(context.system);
    const FakeStream::Current current(stream);
    float value = static_cast<float>(context.rank.value);
    half->run(device_sum_of(value, *half, stream));
    require(stream.synchronize(context.system.deadline_in(kPatience)), "the stream has ended");
    require(value == (context.rank.value < 2 ? 1.0F : 5.0F), "the sum of the half");
    half->close(context.system.deadline_in(kPatience));
    world->close(context.system.deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// NCCL needs the calls of two groups on one device in the same order on all ranks. The call on the
// CPU keeps the first group busy, for as long as rank 1 is late.
TEST(DeviceEngineTest, CallsOfTwoGroupsAreSubmittedInTheOrderOfTheProgram) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(2, [&](RankContext& context) {
    std::string order;
    const auto world = connect_ranks(
        context, with_hooked_device(peers, context.rank, [&](const BackendSetup& setup, auto&) {
          order += setup.group + " ";
          return Status();
        }));
    const auto both =
        split(*world, {.color = 0, .name = "both"}, context.system.deadline_in(kPatience));
    FakeStream stream(context.system);
    const FakeStream::Current current(stream);
    float values[3] = {1, 1, 1};
    if (context.rank == 1) {
      context.system.make_waiter()->park(context.system.deadline_in(milliseconds(200)));
    }
    const Work on_cpu = world->issue(sum_of(values[0]));
    const Work first = world->issue(device_sum_of(values[1], *world, stream));
    const Work second = both->issue(device_sum_of(values[2], *both, stream));
    for (const Work* work : {&on_cpu, &first, &second}) work->wait();
    require(stream.synchronize(context.system.deadline_in(kPatience)), "the stream has ended");
    require(order == "world both ", order);
    both->close(context.system.deadline_in(kPatience));
    world->close(context.system.deadline_in(kPatience));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The engine connects its ranks in the first submit(), which does not return before all ranks have
// made the call.
TEST(DeviceEngineTest, ACallThatBlocksInSubmitIsComparedWithThoseOfThePeers) {
  const auto peers = std::make_shared<RanksInProcess>();
  const auto result = run(2, [&](RankContext& context) {
    const auto hook = [&](const BackendSetup& setup, const OpContext& op) -> Status {
      const auto waiter = context.system.make_waiter();
      while (!setup.interrupt.is_raised()) {
        if (op.deadline.has_passed(context.system.now())) return Error(ErrorCode::kTimeout, "late");
        waiter->park(context.system.deadline_in(milliseconds(5)));
      }
      return Error(ErrorCode::kAborted, "the group has failed");
    };
    const auto group = connect_ranks(context, with_hooked_device(peers, context.rank, hook));
    FakeStream stream(context.system);
    const FakeStream::Current current(stream);
    std::array<float, 2> values{};
    Collective sum = device_sum_of(values[0], *group, stream);
    sum.in = sum.out = std::as_writable_bytes(std::span(values).first(context.rank == 0 ? 1 : 2));
    context.output = failure_of([&] { group->issue(sum).wait(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, ::testing::StartsWith("kInvalidArgument: all_reduce #1 "));
    EXPECT_THAT(rank.output, HasSubstr("all_reduce(sum, float32 x 1, on the device)"));
    EXPECT_THAT(rank.output, HasSubstr("all_reduce(sum, float32 x 2, on the device)"));
  }
}

// A call with memory of the CPU on one rank and of the device on the other is no call of both: it
// fails, and the next call that they share says why.
// In a process of its own, because the engine that the failed group leaves behind keeps its
// threads.
TEST(DeviceEngineTest, CpuMemoryOnOneRankAndDeviceMemoryOnAnotherIsAMismatch) {
  const auto process = testing::run_ranks_as_processes(1, [](RankContext&) {
    const auto peers = std::make_shared<RanksInProcess>();
    // Lives until the process ends, as the engine does.
    FakeStream& stream = *std::make_unique<FakeStream>(testing::process_system()).release();
    static float values[2] = {1, 1};
    const auto result = run(2, [&](RankContext& context) {
      const auto group = connect_ranks(context, with_device(peers, context.rank));
      float& value = values[context.rank.value];
      context.output = failure_of([&] {
        if (context.rank == 0) return group->run(sum_of(value));
        const FakeStream::Current current(stream);
        static_cast<void>(group->issue(device_sum_of(value, *group, stream)));
        float other = 1;
        group->run(sum_of(other));
      });
    });
    require(result.ok(), result.failures());
    for (const testing::RankOutcome& rank : result.ranks) {
      require(rank.output.starts_with("kInvalidArgument: ") &&
                  rank.output.find("all_reduce(sum, float32 x 1)") != std::string::npos,
              rank.output);
    }
  });
  EXPECT_TRUE(process.ok()) << process.failures();
}

}  // namespace
}  // namespace cadre
