// Tests a stream-ordered engine alone and as the engine of a Communicator: its operations start
// after the work on the caller's stream, complete later, and other streams can be made to wait for
// them.
#include "cadre/testing/core/fake_stream_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Duration kStreamPatience = std::chrono::seconds(20);

// Tests rank 0 of two ranks. FormulaPeers computes the other rank's input, which is twice that of
// rank 0.
class FakeStreamBackendTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_.deadline_in(kStreamPatience); }

  // The on_call function must not use `this`: a group may abandon its engine, which then runs the
  // call after the test has ended.
  std::shared_ptr<FakeCalls> make_gated_calls(Status status = {}) {
    return std::make_shared<FakeCalls>(
        [gate = gate_, &system = system_, status](FakeCall& call) -> Status {
          gate->wait(system.deadline_in(kStreamPatience));
          return status.ok() ? call.pass_on() : status;
        });
  }
  FakeStreamBackend make_engine(std::shared_ptr<FakeCalls> calls) {
    return FakeStreamBackend({.group = "g", .rank = 0, .world_size = 2, .system = system_},
                             std::make_shared<FormulaPeers>(), std::move(calls));
  }
  std::unique_ptr<Communicator> make_group(std::shared_ptr<FakeCalls> calls) {
    return make_group(system_, std::move(calls));
  }
  static std::unique_ptr<Communicator> make_group(os::System& system,
                                                  std::shared_ptr<FakeCalls> calls) {
    CommunicatorOptions options;
    options.timeout = kStreamPatience;
    options.backend = fake_stream_backend(std::make_shared<FormulaPeers>(), std::move(calls));
    return make_lone_group(system, 2, options);
  }
  Collective sum(float& value, FakeStream* stream = nullptr) {
    const Bytes data = std::as_writable_bytes(std::span(&value, 1));
    Collective c = Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
    if (stream == nullptr) return c;
    c.device = {DeviceType::kCuda, 0};
    c.after = stream->point();
    return c;
  }
  Completion submit(Backend& engine, std::span<Collective> collectives) {
    std::vector<Fingerprint> fingerprints;
    for (Collective& c : collectives) {
      fingerprints.push_back(validate(c, 0, 2).value_or_throw().fingerprint());
    }
    OpProgress progress;
    return engine.submit(
        {.number = 1, .fingerprints = fingerprints, .deadline = soon(), .progress = progress},
        collectives);
  }
  void await(const std::function<bool()>& is_met) {
    const Deadline deadline = soon();
    while (!is_met() && !deadline.has_passed(system_.now())) {
      system_.make_waiter()->park(system_.deadline_in(std::chrono::milliseconds(1)));
    }
    EXPECT_TRUE(is_met());
  }
  // Waits until the engine has started its first collective.
  void await_begin(const FakeCalls& calls) {
    await([&] { return !calls.log().empty(); });
  }
  // Waits until an operation has completed, and returns its status. The test must set gate_ before,
  // because the call waits for it.
  Status wait_for(const Completion& completion) {
    FakeEvent end(system_);
    Status status;
    completion.on_done([&](const Status& result) {
      status = result;
      end.set();
    });
    EXPECT_TRUE(end.wait(soon()));
    return status;
  }

  os::System& system_ = process_system();
  const std::shared_ptr<FakeEvent> gate_ = std::make_shared<FakeEvent>(system_);
};

TEST_F(FakeStreamBackendTest, CompletesLaterAndRunsCallbacksOnce) {
  auto engine = make_engine(make_gated_calls());
  float value = 1;
  Collective collective = sum(value);
  int num_callbacks = 0;
  const Completion completion = submit(engine, {&collective, 1});
  completion.on_done([&](const Status&) { ++num_callbacks; });
  EXPECT_FALSE(completion.is_done());
  EXPECT_EQ(num_callbacks, 0);
  EXPECT_EQ(value, 1);
  gate_->set();
  EXPECT_TRUE(wait_for(completion).ok());
  EXPECT_TRUE(completion.is_done() && completion.is_stream_ordered());
  EXPECT_EQ(num_callbacks, 1);
  EXPECT_EQ(value, 3);
}

TEST_F(FakeStreamBackendTest, BeginsAfterTheStreamOfTheCallAndOrdersAnotherOneBehindIt) {
  auto engine = make_engine(std::make_shared<FakeCalls>());
  FakeStream before(system_);
  FakeStream after(system_);
  float value = 0;
  float seen = 0;
  before.enqueue([&] {
    gate_->wait(soon());
    value = 5;
  });
  Collective collective = sum(value, &before);
  const Completion completion = submit(engine, {&collective, 1});
  EXPECT_TRUE(!completion.is_done() && completion.is_stream_ordered());
  {
    const FakeStream::Current current(after);
    ASSERT_TRUE(completion.order_current_stream().ok());
  }
  after.enqueue([&] { seen = value; });
  EXPECT_FALSE(after.synchronize(system_.deadline_in(std::chrono::milliseconds(20))));
  gate_->set();
  ASSERT_TRUE(after.synchronize(soon()));
  EXPECT_EQ(seen, 15);
}

TEST_F(FakeStreamBackendTest, ResultsInTheMemoryOfTheHostAreNotOrderedButWaitedFor) {
  auto engine = make_engine(make_gated_calls());
  float value = 1;
  Collective collective = sum(value);
  const Completion completion = submit(engine, {&collective, 1});
  EXPECT_FALSE(completion.is_stream_ordered());
  gate_->set();
  EXPECT_TRUE(wait_for(completion).ok());
}

TEST_F(FakeStreamBackendTest, TheFirstErrorOfACallEndsIt) {
  const auto calls = std::make_shared<FakeCalls>([](FakeCall& call) -> Status {
    if (call.number == 2) throw Error(ErrorCode::kUnavailable, "the device is gone");
    return call.pass_on();
  });
  auto engine = make_engine(calls);
  std::vector<float> values = {1, 1, 1};
  std::vector<Collective> collectives;
  for (float& value : values) collectives.push_back(sum(value));
  const Status status = wait_for(submit(engine, collectives));
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.error().message(), HasSubstr("the device is gone"));
  EXPECT_THAT(values, ElementsAre(3, 1, 1));
  EXPECT_EQ(calls->log().size(), 2u);
}

TEST_F(FakeStreamBackendTest, AGroupWaitsForResultsInTheMemoryOfTheHost) {
  const auto calls = std::make_shared<FakeCalls>();
  const auto group = make_group(calls);
  EXPECT_EQ(group->backend_name(), "fake_stream");
  float value = 1;
  group->run(sum(value));
  EXPECT_EQ(value, 3);
  std::vector<float> values = {1, 2, 3};
  std::vector<Work> works;
  for (float& v : values) works.push_back(group->issue(sum(v)));
  for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
  EXPECT_THAT(values, ElementsAre(3, 6, 9));
  EXPECT_EQ(calls->log().size(), 4u);
  group->close(soon());
}

TEST_F(FakeStreamBackendTest, WaitOfAGroupOrdersTheStreamAndDoesNotBlock) {
  const auto group = make_group(make_gated_calls());
  FakeStream stream(system_);
  float value = 1;
  float seen = 0;
  const FakeStream::Current current(stream);
  const Work work = group->issue(sum(value, &stream));
  work.wait();
  EXPECT_FALSE(work.is_completed());
  stream.enqueue([&] { seen = value; });
  gate_->set();
  ASSERT_TRUE(stream.synchronize(soon()));
  EXPECT_EQ(seen, 3);
  group->close(soon());
  EXPECT_TRUE(work.is_completed());
}

TEST_F(FakeStreamBackendTest, CloseWaitsForWhatIsEnqueued) {
  const auto group = make_group(make_gated_calls());
  FakeStream stream(system_);
  float value = 1;
  const Work work = group->issue(sum(value, &stream));
  FakeStream opener(system_);
  opener.enqueue([this] {
    system_.make_waiter()->park(system_.deadline_in(std::chrono::milliseconds(50)));
    gate_->set();
  });
  group->close(soon());
  EXPECT_TRUE(work.is_completed());
  EXPECT_FALSE(work.error());
  EXPECT_EQ(value, 3);
}

TEST_F(FakeStreamBackendTest, AnErrorThatCompletesLaterIsTheFailureOfTheGroup) {
  const auto calls = make_gated_calls(Error(ErrorCode::kUnavailable, "the device is gone"));
  const auto group = make_group(calls);
  FakeStream stream(system_);
  const FakeStream::Current current(stream);
  float value = 1;
  const Work work = group->issue(sum(value, &stream));
  work.wait();
  EXPECT_FALSE(work.error());
  gate_->set();
  ASSERT_TRUE(stream.synchronize(soon()));
  const std::string failure = failure_of([&] { group->run(sum(value)); });
  EXPECT_THAT(failure, HasSubstr("the device is gone"));
  EXPECT_THAT(failure, HasSubstr("all_reduce"));
  EXPECT_THAT(failure, HasSubstr("#1"));
  // Waits for the failure of the group, which is set before the operations fail.
  await([&] { return work.error().has_value(); });
  EXPECT_THAT(work.error()->message(), HasSubstr("the device is gone"));
  group->close(soon());
}

constexpr const char* kEndProcess = "end the process instead of calling rejoin()";

// This engine cannot be aborted. When the group fails, wait() must throw at once, but the memory of
// the operation must be kept until the engine has completed the operation.
TEST_F(FakeStreamBackendTest, AFailureEndsTheWaitsAndKeepsTheMemoryUntilTheEngineIsDone) {
  const auto calls = make_gated_calls();
  const auto group = make_group(calls);
  auto value = std::make_shared<float>(1);
  const std::weak_ptr<float> memory = value;
  const Collective collective = sum(*value);
  const Work work = group->issue(collective, {.keep_alive = std::move(value)});
  await_begin(*calls);
  FakeStream other(system_);
  other.enqueue([&] { group->abort("the test"); });
  const std::string failure = failure_of([&] { work.wait(); });
  EXPECT_THAT(failure, HasSubstr("abort() was called: the test"));
  EXPECT_THAT(failure, HasSubstr(kEndProcess));
  EXPECT_THAT(failure, HasSubstr("\"fake_stream\""));
  group->close(soon());
  ASSERT_FALSE(memory.expired());
  EXPECT_EQ(*memory.lock(), 1);
  gate_->set();
  await([&] { return memory.expired(); });
}

// A callback of the first call waits for the second call. One thread ends both calls, so the
// callback must not block this thread.
TEST_F(FakeStreamBackendTest, ACallbackWaitsForAnotherCallThatAFailureEnds) {
  const auto calls = make_gated_calls();
  const auto group = make_group(calls);
  static float value = 1;  // static: the engine may write it after the test
  const Work first = group->issue(sum(value));
  const Work second = group->issue(sum(value));
  std::string failure_of_second;
  first.on_completed([&](const std::optional<Error>&) {
    failure_of_second = failure_of([&] { second.wait(std::chrono::seconds(2)); });
  });
  await_begin(*calls);
  group->abort("the test");
  EXPECT_THAT(failure_of([&] { first.wait(soon()); }), HasSubstr("abort() was called"));
  await([&] { return second.is_completed(); });
  group->close(soon());
  EXPECT_THAT(failure_of_second, HasSubstr("abort() was called: the test"));
  gate_->set();
}

TEST_F(FakeStreamBackendTest, ACallThatTheEngineDoesNotEndFailsAtItsDeadline) {
  const auto group = make_group(make_gated_calls());
  static float value = 1;  // static: the engine may write it after the test
  const Deadline deadline = system_.deadline_in(std::chrono::milliseconds(50));
  const std::string failure = failure_of([&] { group->run(sum(value), {.deadline = deadline}); });
  EXPECT_THAT(failure, HasSubstr("all_reduce #1"));
  EXPECT_THAT(failure, HasSubstr("timed out"));
  EXPECT_THAT(failure, HasSubstr(kEndProcess));
  gate_->set();
  group->close(soon());
}

// If no thread can be started to watch the deadline of a call, the engine must not get the call: it
// would write to the buffer after the call has thrown.
TEST_F(FakeStreamBackendTest, ACallThatCannotBeWatchedIsNotSubmitted) {
  struct NoWatch final : ForwardingSystem {
    using ForwardingSystem::ForwardingSystem;
    std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
      if (name == "cadre-watch") throw Error(ErrorCode::kUnavailable, "no thread is left");
      return ForwardingSystem::spawn(std::move(name), std::move(body));
    }
  };
  NoWatch system(system_);
  const auto calls = std::make_shared<FakeCalls>();
  auto group = make_group(system, calls);
  float value = 1;
  const auto run = [&] { group->run(sum(value)); };
  EXPECT_EQ(failed_fields_of(run), "kUnavailable culprit=0 operation=all_reduce#1");
  group->close(soon());
  group.reset();  // The engine would run an enqueued operation after this.
  EXPECT_EQ(value, 1);
  EXPECT_THAT(calls->log(), ElementsAre());
}

// close() must make the watch thread end the enqueued operations, long before their own deadline.
TEST_F(FakeStreamBackendTest, CloseEndsACallThatTheEngineDoesNotEnd) {
  const auto calls = make_gated_calls();
  const auto group = make_group(calls);
  static float value = 1;  // static: the engine may write it after the test
  const Work work = group->issue(sum(value), {.deadline = soon()});
  await_begin(*calls);
  const TimePoint begin = system_.now();
  group->close(system_.deadline_in(std::chrono::milliseconds(50)));
  EXPECT_LT(system_.now() - begin, kStreamPatience / 2);
  EXPECT_TRUE(work.error().has_value());
  gate_->set();
}

// If the destructor waited for the engine, it would wait for a lost rank without end. The test runs
// in its own process, because the group leaves its engine running.
TEST_F(FakeStreamBackendTest, AGroupIsDestroyedWhileItsEngineCannotEnd) {
  const auto result = run_ranks_as_processes(1, [this](RankContext& context) {
    const auto calls = make_gated_calls();
    auto group = make_group(calls);
    static float value = 1;
    const Work work = group->issue(sum(value));
    await_begin(*calls);
    group->abort("the test");
    const TimePoint begin = context.system.now();
    group.reset();
    require(context.system.now() - begin < kStreamPatience / 2, "the group waited for its engine");
    require(value == 1 && work.is_completed(), "the engine has ended the operation");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::testing
