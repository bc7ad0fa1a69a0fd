// Tests a group whose engine or transport throws, in the caller's thread or in a thread of the
// group. The operation and the group must fail, and the errors on both ranks must name the
// operation and the rank whose engine or transport has thrown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/comm/collective_runner.h"
#include "cadre/core/comm/messages/message_queue.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr Duration kPatience = seconds(20);

// An engine in which every operation throws std::bad_alloc.
class ThrowingEngine final : public Backend {
 public:
  Capabilities capabilities() const override { return full_capabilities("throwing"); }
  Completion submit(const OpContext&, std::span<const Collective>) override {
    throw std::bad_alloc();
  }
};

// An engine that only enqueues operations. The test completes them.
class EnqueueingEngine final : public Backend {
 public:
  explicit EnqueueingEngine(std::vector<Completion>& enqueued) : enqueued_(enqueued) {}
  Capabilities capabilities() const override { return {}; }
  Completion submit(const OpContext&, std::span<const Collective>) override {
    struct End final : DevicePoint {
      Status order_current_stream() const override { return {}; }
    };
    enqueued_.push_back(Completion::make_pending(std::make_shared<const End>()));
    return enqueued_.back();
  }

 private:
  std::vector<Completion>& enqueued_;
};

class ThrowingChannel final : public Channel {
 public:
  Result<size_t> try_send(ConstBytes) override { return fail(); }
  Result<size_t> try_recv(Bytes) override { return fail(); }
  bool throws = true;

 private:
  Result<size_t> fail() const {
    if (throws) throw std::bad_alloc();
    return Error(ErrorCode::kCorruption, "nonsense");
  }
};

// The transport of rank 0 in a world of two ranks. Its channel throws.
class ThrowingTransport final : public Transport {
 public:
  Rank rank() const override { return 0; }
  int world_size() const override { return 2; }
  Channel& channel(Rank) override { return channel_; }
  Status wait(std::span<const ChannelInterest>, Deadline) override { return {}; }
  void wake() override {}
  void end_with_error() { channel_.throws = false; }

 private:
  ThrowingChannel channel_;
};

// Two ranks with connected control planes and one monitor each. Only rank 0 has the other parts of
// the group.
class ExceptionTest : public ::testing::Test {
 protected:
  ExceptionTest() {
    const auto listener =
        system_->listen(testing::make_rendezvous_address(*system_)).value_or_throw();
    auto called = system_->connect(listener->address(), soon()).value_or_throw();
    std::unique_ptr<os::Socket> accepted;
    while (accepted == nullptr) accepted = listener->try_accept().value_or_throw();
    planes_[0] = make_plane(0, std::move(called));
    planes_[1] = make_plane(1, std::move(accepted));
    here_ = make_monitor(0);
    there_ = make_monitor(1);
    recorder_ = FlightRecorder::create("", {}).value_or_throw();
    fork_guard_ = std::make_shared<const ForkGuard>("world", 0, system_->host().pid,
                                                    std::make_shared<const os::ForkMark>());
  }
  ~ExceptionTest() override {
    if (collectives_ != nullptr) collectives_->close();
    if (messages_ != nullptr) messages_->close();
    here_->stop();
    there_->stop();
  }

  static Layout make_layout() {
    wire::RankAddress rank_address;
    rank_address.host = "node0";
    rank_address.pid = 4711;
    return Layout({rank_address, rank_address});
  }
  std::unique_ptr<ControlPlane> make_plane(int rank, std::unique_ptr<os::Socket> socket) {
    ControlPlane::Setup setup;
    setup.layout = layout_;
    setup.rank = rank;
    setup.control.resize(2);
    setup.control[static_cast<size_t>(1 - rank)] = std::move(socket);
    setup.silence_limit = kDefaultSilenceLimit;
    return std::make_unique<ControlPlane>(*system_, std::move(setup));
  }
  std::shared_ptr<Monitor> make_monitor(int rank) {
    constexpr GroupKey kGroup = 7;
    auto monitor =
        std::make_shared<Monitor>(*system_,
                                  MonitorSetup{.roster = {"world", rank, layout_, {0, 1}},
                                               .key = kGroup,
                                               .plane = planes_[static_cast<size_t>(rank)].get(),
                                               .slots = {-1, -1},
                                               .record_path = "",
                                               .log = nullptr},
                                  StatusPage(), std::make_shared<GroupCell>());
    monitor->start();
    return monitor;
  }
  OperationQueue& collectives(std::unique_ptr<Backend> engine) {
    engines_.set_host(std::move(engine));
    runner_ = std::make_unique<CollectiveRunner>(
        CollectiveRunner::Parts{*system_, *here_, *recorder_, engines_, nullptr, kPatience});
    collectives_ = std::make_shared<OperationQueue>(*system_, *runner_, fork_guard_, nullptr);
    return *collectives_;
  }
  MessageQueue& messages() {
    messages_ = std::make_shared<MessageQueue>(MessageQueue::Parts{
        *system_, *here_, *recorder_, transport_, kPatience, fork_guard_, nullptr});
    return *messages_;
  }
  Deadline soon() { return system_->deadline_in(kPatience); }

  // Expects that the errors on both ranks name the operation, the failure and the rank.
  void expect_failure_of(const std::string& operation, const std::string& failure) {
    EXPECT_THAT(failure, StartsWith("kUnavailable: " + operation + " on group \"world\" failed"));
    EXPECT_THAT(failure, HasSubstr("on rank 0 (node0, pid 4711)\n  out of memory"));
    ASSERT_TRUE(here_->has_failed());
    EXPECT_EQ(here_->error().details().culprit, 0);
    there_->await_failure(-1, soon());
    ASSERT_TRUE(there_->has_failed());
    EXPECT_EQ(there_->error().code(), ErrorCode::kAborted);
    EXPECT_THAT(there_->error().message(), HasSubstr("first failure: " + operation));
    EXPECT_THAT(there_->error().message(), HasSubstr("out of memory"));
    EXPECT_EQ(there_->error().details().reporter, 0);
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::shared_ptr<const Layout> layout_ = std::make_shared<const Layout>(make_layout());
  EngineSet engines_;
  std::vector<Completion> enqueued_;
  ThrowingTransport transport_;
  std::array<std::unique_ptr<ControlPlane>, 2> planes_;
  std::shared_ptr<Monitor> here_;
  std::shared_ptr<Monitor> there_;
  std::unique_ptr<FlightRecorder> recorder_;
  std::shared_ptr<const ForkGuard> fork_guard_;
  std::unique_ptr<CollectiveRunner> runner_;
  std::shared_ptr<OperationQueue> collectives_;
  std::shared_ptr<MessageQueue> messages_;
};

Operation throwing_barrier() {
  static const Collective barrier = Collective::barrier();
  static const Fingerprint fingerprint = OpDescriptor{}.fingerprint();
  return {.collectives = {&barrier, 1}, .fingerprints = {&fingerprint, 1}};
}

TEST_F(ExceptionTest, OfACollectiveInTheCallersThread) {
  OperationQueue& queue = collectives(std::make_unique<ThrowingEngine>());
  Operation operation = throwing_barrier();
  const std::string failure = testing::failure_of([&] { queue.run(operation); });
  expect_failure_of("barrier #1", failure);
  ASSERT_TRUE(queue.is_idle());
  EXPECT_EQ(testing::failure_of([&] { queue.run(operation); }), failure);
}

TEST_F(ExceptionTest, OfACollectiveInTheProgressThread) {
  OperationQueue& queue = collectives(std::make_unique<ThrowingEngine>());
  const Work first = queue.issue(throwing_barrier());
  const Work second = queue.issue(throwing_barrier());
  const std::string failure = testing::failure_of([&] { first.wait(soon()); });
  expect_failure_of("barrier #1", failure);
  EXPECT_EQ(testing::failure_of([&] { second.wait(soon()); }), failure);
}

// An engine reports the error of an enqueued operation later. This rank's status shows the oldest
// enqueued operation, which is the one that fails.
TEST_F(ExceptionTest, AnErrorThatTheEngineReportsLaterIsTheFailureOfTheGroup) {
  OperationQueue& queue = collectives(std::make_unique<EnqueueingEngine>(enqueued_));
  const Work first = queue.issue(throwing_barrier());
  const Work second = queue.issue(throwing_barrier());
  for (const Work& work : {first, second}) work.wait(soon());
  const auto seen = [&] { return here_->own_cell().read(system_->now()); };
  EXPECT_EQ(seen().number, 1U);
  EXPECT_EQ(seen().phase, "enqueued");
  EXPECT_EQ(seen().state, wire::ActivityState::kRunning);
  enqueued_[0].complete({});
  EXPECT_TRUE(first.is_completed());
  EXPECT_EQ(seen().number, 2U);
  EXPECT_EQ(seen().state, wire::ActivityState::kRunning);
  enqueued_[1].complete(
      Error(ErrorCode::kUnavailable, "out of memory").with_details({.is_own_limit = true}));
  const std::string failure = testing::failure_of([&] { second.wait(soon()); });
  expect_failure_of("barrier #2", failure);
  EXPECT_EQ(seen().state, wire::ActivityState::kFailed);
  EXPECT_EQ(testing::failure_of([&] { (void)queue.issue(throwing_barrier()).wait(soon()); }),
            failure);
  const FlightRecord record = recorder_->read();
  ASSERT_EQ(record.entries.size(), 2U);
}

TEST_F(ExceptionTest, OfAMessageInTheCallersThread) {
  MessageQueue& queue = messages();
  std::array<std::byte, 8> data{};
  const MessageCall message = MessageCall::recv(data, DType::kUint8, 1, 0);
  const std::string failure = testing::failure_of([&] { queue.run(message, {}, {}); });
  expect_failure_of("recv #1", failure);
  ASSERT_TRUE(queue.is_idle());
  EXPECT_EQ(testing::failure_of([&] { queue.run(message, {}, {}); }), failure);
}

TEST_F(ExceptionTest, OfAMessageInTheThreadOfMessages) {
  MessageQueue& queue = messages();
  std::array<std::byte, 8> data{};
  const MessageCall message = MessageCall::send(data, DType::kUint8, 1, 0);
  const Work work = queue.issue({&message, 1}, {}, {}).front();
  const std::string failure = testing::failure_of([&] { work.wait(soon()); });
  expect_failure_of("send #1", failure);
  EXPECT_TRUE(work.error().has_value());
}

// The owner (keep_alive) of a message calls the queue from another thread when it is deleted, so
// holding a lock at that time would cause a deadlock. See also operation_queue_test.cpp.
TEST_F(ExceptionTest, TheOwnerOfAMessageIsReleasedWithoutALock) {
  MessageQueue& queue = messages();
  transport_.end_with_error();
  std::atomic<bool> has_answer{false};
  bool was_free = false;
  std::unique_ptr<os::Thread> user;
  std::array<std::byte, 8> data{};
  {
    std::shared_ptr<const void> owner(&queue, [&](const void*) {
      user = system_->spawn("user", [&] {
        static_cast<void>(queue.is_idle());
        has_answer = true;
      });
      const Deadline deadline = system_->deadline_in(seconds(2));
      while (!has_answer && !deadline.has_passed(system_->now())) system_->yield();
      was_free = has_answer;
    });
    const MessageCall message = MessageCall::send(data, DType::kUint8, 1, 0);
    const Work work = queue.issue({&message, 1}, {}, {.keep_alive = std::move(owner)}).front();
    EXPECT_NE(testing::failure_of([&] { work.wait(soon()); }), "");
  }
  ASSERT_NE(user, nullptr);
  user->join();
  EXPECT_TRUE(was_free);
}

// close() must not end a message that a waiting caller is ending: the deleter of its owner may take
// longer than close() waits after an abort.
TEST_F(ExceptionTest, ACloseLeavesTheMessageThatAWaitingCallerEnds) {
  MessageQueue& queue = messages();
  transport_.end_with_error();
  std::atomic<bool> is_releasing{false};
  std::atomic<bool> may_end{false};
  const auto await = [&](const std::atomic<bool>& flag) {
    const Deadline deadline = soon();
    while (!flag && !deadline.has_passed(system_->now())) system_->yield();
  };
  std::array<std::byte, 8> data{};
  std::shared_ptr<const void> owner(&queue, [&](const void*) {
    is_releasing = true;
    await(may_end);
  });
  CollectiveOptions options{.keep_alive = std::move(owner)};
  std::string failure;
  const auto caller = system_->spawn("caller", [&] {
    failure = testing::failure_of([&] {
      queue.run(MessageCall::send(data, DType::kUint8, 1, 0), {}, std::exchange(options, {}));
    });
  });
  await(is_releasing);
  queue.close();
  EXPECT_FALSE(queue.is_idle());
  may_end = true;
  caller->join();
  EXPECT_THAT(failure, HasSubstr("nonsense"));
  EXPECT_TRUE(queue.is_idle());
}

}  // namespace
}  // namespace cadre
