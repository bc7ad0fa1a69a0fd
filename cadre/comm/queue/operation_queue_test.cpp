// What the queue of collectives does when an operation throws, when an owner's deleter uses it, and
// when its thread cannot be started.
#include "cadre/comm/queue/operation_queue.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "cadre/collective/op.h"
#include "cadre/testing/forwarding_system.h"
#include "cadre/testing/leftovers.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kPatience = seconds(20);

class ScriptedRunner final : public OperationRunner {
 public:
  using Script = std::function<Completion(const Operation&)>;
  explicit ScriptedRunner(Script script) : script_(std::move(script)) {}
  Completion run(Operation& operation) override { return script_(operation); }
  void fail(const Error& error) override { failure = error; }

  std::optional<Error> failure;

 private:
  Script script_;
};

Completion out_of_memory_at_first(const Operation& operation) {
  if (operation.number == 1) throw std::bad_alloc();
  return Status();
}

// Of several barriers, on streams that are told apart by their addresses.
Operation barrier_operation(size_t num_collectives = 1) {
  static std::array<Collective, 3> collectives;
  static const Fingerprint fingerprint = OpDescriptor{}.fingerprint();
  static const std::array<Fingerprint, 3> fingerprints = {fingerprint, fingerprint, fingerprint};
  for (Collective& collective : collectives) collective.stream = &collective;
  return {.collectives = std::span(collectives).first(num_collectives),
          .fingerprints = std::span(fingerprints).first(num_collectives)};
}

class OperationQueueTest : public ::testing::Test {
 protected:
  ~OperationQueueTest() override {
    if (queue_ != nullptr) queue_->close();
  }

  OperationQueue& start(ScriptedRunner::Script script) {
    runner_ = std::make_unique<ScriptedRunner>(std::move(script));
    queue_ = std::make_shared<OperationQueue>(
        system(), *runner_,
        std::make_shared<const ForkGuard>("world", 0, native_->host().pid,
                                          std::make_shared<const os::ForkMark>()));
    return *queue_;
  }
  virtual os::System& system() { return *native_; }
  Deadline soon() { return native_->deadline_in(kPatience); }

  std::unique_ptr<os::System> native_ = os::make_native_system();
  std::unique_ptr<ScriptedRunner> runner_;
  std::shared_ptr<OperationQueue> queue_;
};

TEST_F(OperationQueueTest, AnExceptionInTheCallersThreadEndsTheOperationAndGivesTheRoleBack) {
  OperationQueue& queue = start(out_of_memory_at_first);
  Operation first = barrier_operation();
  EXPECT_EQ(testing::failure_of([&] { queue.run(first); }), "kUnavailable: out of memory");
  // Else the next call would wait for a role that nobody holds.
  ASSERT_TRUE(queue.is_idle());
  Operation second = barrier_operation();
  queue.run(second);
}

// What close() may wait for: an operation that has ended is counted once, however it was run.
TEST_F(OperationQueueTest, AnOperationIsPendingUntilItHasEnded) {
  std::atomic<uint64_t> last_to_end = 2;
  OperationQueue& queue = start([&](const Operation& operation) {
    while (operation.number > last_to_end) system().yield();
    return Status();
  });
  for (int i = 0; i < 2; ++i) {
    Operation direct = barrier_operation();
    queue.run(direct);
    EXPECT_FALSE(queue.has_pending());
  }
  for (const uint64_t number : {3, 4}) {
    const Work work = queue.issue(barrier_operation());
    EXPECT_TRUE(queue.has_pending()) << number;
    last_to_end = number;
    work.wait();
    EXPECT_FALSE(queue.has_pending()) << number;
    // The role is given back after that.
    ASSERT_TRUE(queue.drain(soon()));
  }
}

TEST_F(OperationQueueTest, AnExceptionInTheProgressThreadEndsTheOperationOnly) {
  OperationQueue& queue = start(out_of_memory_at_first);
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  // With a deadline the caller leaves the role to the thread.
  EXPECT_EQ(testing::failure_of([&] { first.wait(soon()); }), "kUnavailable: out of memory");
  second.wait(soon());
  EXPECT_EQ(first.error()->code(), ErrorCode::kUnavailable);
}

TEST_F(OperationQueueTest, AnyOtherExceptionIsNamed) {
  OperationQueue& queue = start([](const Operation& operation) -> Completion {
    if (operation.number == 1) throw std::logic_error("a broken invariant");
    throw Error(ErrorCode::kTimeout, "the engine was late");
  });
  Operation operation = barrier_operation();
  EXPECT_EQ(testing::failure_of([&] { queue.run(operation); }),
            "kInternal: unexpected exception: a broken invariant");
  EXPECT_EQ(testing::failure_of([&] { queue.run(operation); }), "kTimeout: the engine was late");
}

// A process with many groups that rest has no thread for any of them.
TEST_F(OperationQueueTest, TheThreadEndsAfterASecondWithoutWorkAndIsStartedAgain) {
  const int num_threads = testing::count_resources().num_threads;
  OperationQueue& queue = start([](const Operation&) { return Status(); });
  for (int round = 0; round < 2; ++round) {
    queue.issue(barrier_operation()).wait(soon());
    EXPECT_EQ(testing::count_resources().num_threads, num_threads + 1);
    const Deadline deadline = soon();
    while (testing::count_resources().num_threads > num_threads) {
      ASSERT_FALSE(deadline.has_passed(native_->now())) << "the thread is still there";
      native_->yield();
    }
  }
  EXPECT_EQ(queue.num_issued(), 2U);
}

// The deleter asks from another thread, so that a lock which is held shows as a wait and not as a
// deadlock of the test.
TEST_F(OperationQueueTest, AnOwnersDeleterMayUseTheQueue) {
  OperationQueue& queue = start([](const Operation&) { return Status(); });
  std::atomic<bool> has_answer{false};
  bool was_free = false;
  std::unique_ptr<os::Thread> user;
  {
    std::shared_ptr<const void> owner(&queue, [&](const void*) {
      user = native_->spawn("user", [&] {
        static_cast<void>(queue.num_issued());
        has_answer = true;
      });
      const Deadline deadline = native_->deadline_in(seconds(2));
      while (!has_answer && !deadline.has_passed(native_->now())) native_->yield();
      was_free = has_answer;
    });
    Operation operation = barrier_operation();
    operation.keep_alive = std::move(owner);
    const Work work = queue.issue(std::move(operation));
    work.wait(soon());
  }
  user->join();
  EXPECT_TRUE(was_free);
}

// Threads can be started or not, or do nothing, as the test says.
class ScarceThreads final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
    if (is_scarce) throw Error(ErrorCode::kUnavailable, "start thread \"" + name + "\"");
    if (is_idle) body = [] {};
    auto thread = inner_.spawn(std::move(name), std::move(body));
    if (after_start) after_start();
    return thread;
  }
  bool is_scarce = false;
  bool is_idle = false;
  std::function<void()> after_start;
};

class OperationQueueThreadTest : public OperationQueueTest {
 protected:
  ~OperationQueueThreadTest() override {
    if (queue_ != nullptr) queue_->close();
  }
  os::System& system() override { return scarce_; }
  ScarceThreads scarce_{*native_};
};

TEST_F(OperationQueueThreadTest, WithoutAThreadNothingIsIssued) {
  OperationQueue& queue = start([](const Operation&) { return Status(); });
  scarce_.is_scarce = true;
  EXPECT_EQ(testing::failure_of([&] { (void)queue.issue(barrier_operation()); }),
            "kUnavailable: barrier() was not issued: start thread \"cadre-progress\"");
  EXPECT_TRUE(queue.is_idle());
  EXPECT_EQ(queue.num_issued(), 0U);
  scarce_.is_scarce = false;
  const Work work = queue.issue(barrier_operation());
  work.wait(soon());
}

// A close() between the start of the thread and the return of issue() must not lose the thread.
TEST_F(OperationQueueThreadTest, ACloseWhileTheThreadStartsJoinsIt) {
  OperationQueue& queue = start([](const Operation&) { return Status(); });
  std::atomic<bool> has_closed{false};
  std::unique_ptr<os::Thread> closer;
  scarce_.after_start = [&] {
    closer = native_->spawn("closer", [&] {
      queue.close();
      has_closed = true;
    });
    const Deadline deadline = native_->deadline_in(milliseconds(200));
    while (!has_closed && !deadline.has_passed(native_->now())) native_->yield();
  };
  const std::string failure =
      testing::failure_of([&] { queue.issue(barrier_operation()).wait(soon()); });
  closer->join();
  EXPECT_TRUE(failure.empty() || failure == "kAborted: the group is closed") << failure;
  EXPECT_TRUE(queue.is_idle());
  EXPECT_EQ(testing::failure_of([&] { (void)queue.issue(barrier_operation()); }),
            "kAborted: the group is closed");
}

// The queue's thread does nothing here, so the caller that waits runs the operation itself.
TEST_F(OperationQueueThreadTest, ACloseLeavesTheOperationThatAWaitingCallerRuns) {
  std::atomic<bool> is_running{false};
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    is_running = true;
    const Deadline deadline = soon();
    while (!may_end && !deadline.has_passed(native_->now())) native_->yield();
    return Status();
  });
  scarce_.is_idle = true;
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  std::string failure = "not called";
  const auto caller =
      native_->spawn("caller", [&] { failure = testing::failure_of([&] { first.wait(); }); });
  const Deadline deadline = soon();
  while (!is_running && !deadline.has_passed(native_->now())) native_->yield();
  queue.close();
  EXPECT_FALSE(first.is_completed());
  EXPECT_FALSE(queue.is_idle());
  EXPECT_EQ(second.error()->message(), "the group is closed");
  may_end = true;
  caller->join();
  EXPECT_EQ(failure, "");
  EXPECT_TRUE(queue.is_idle());
}

}  // namespace
}  // namespace cadre
