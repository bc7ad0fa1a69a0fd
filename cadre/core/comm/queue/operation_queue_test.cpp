// Tests the queue of collectives if an operation throws, if the deleter of an owner calls the
// queue, if its thread cannot be started, and if its engine completes operations later.
#include "cadre/testing/core/scripted_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::barrier_operation;
using testing::OperationQueueTest;
using testing::out_of_memory_at_first;

TEST_F(OperationQueueTest, AnExceptionInTheCallersThreadEndsTheOperationAndGivesTheRoleBack) {
  OperationQueue& queue = start(out_of_memory_at_first);
  Operation first = barrier_operation();
  EXPECT_EQ(testing::failure_of([&] { queue.run(first); }), "kUnavailable: out of memory");
  // If the progress role were not released, the next call would wait for it indefinitely.
  ASSERT_TRUE(queue.is_idle());
  Operation second = barrier_operation();
  queue.run(second);
}

// An operation is pending until it has ended, whether the calling thread or the queue's thread runs
// it: close() waits for pending operations.
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
    // The progress role may be released shortly after the wait has ended.
    ASSERT_TRUE(queue.drain(soon()));
  }
}

TEST_F(OperationQueueTest, AnExceptionInTheProgressThreadEndsTheOperationOnly) {
  OperationQueue& queue = start(out_of_memory_at_first);
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  // A caller that waits with a deadline does not take the progress role, so the queue's thread runs
  // the operation.
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

// The queue's thread ends after a second without work, so that a process with many idle groups has
// no thread for any of them.
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

// The deleter calls the queue from another thread. So if a lock is held, that thread only waits,
// and the test fails instead of hanging.
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

TEST_F(OperationQueueTest, ACallOfSeveralHasAsManyNumbers) {
  std::vector<uint64_t> numbers;
  OperationQueue& queue = start([&](const Operation& operation) {
    numbers.push_back(operation.number);
    EXPECT_EQ(operation.collectives.size(), operation.fingerprints.size());
    return Status();
  });
  Operation three = barrier_operation(3);
  queue.run(three);
  queue.issue(barrier_operation(2)).wait(soon());
  queue.issue(barrier_operation()).wait(soon());
  EXPECT_EQ(numbers, (std::vector<uint64_t>{1, 4, 6}));
  EXPECT_EQ(queue.num_issued(), 6U);
  ASSERT_TRUE(queue.drain(soon()));
  EXPECT_FALSE(queue.has_pending());
}

// A queue with an engine that enqueues operations on the streams of a device. The test completes
// the operations, or the destructor does: an operation refers to its queue until it has ended.
class OperationQueueDeviceTest : public OperationQueueTest {
 protected:
  ~OperationQueueDeviceTest() override {
    for (const Completion& completion : enqueued_) {
      if (!completion.is_done()) completion.complete({});
    }
  }

  OperationQueue& start_device(bool can_order = true) {
    return start(
        [this, can_order](const Operation& operation) { return enqueue(operation, can_order); });
  }
  Completion enqueue(const Operation& operation, bool can_order = true) {
    const std::lock_guard lock(mutex_);
    enqueued_.push_back(Completion::make_pending(
        can_order ? std::make_shared<const NotingPoint>(*this, operation.number) : nullptr));
    submitters_.push_back(std::this_thread::get_id());
    return enqueued_.back();
  }
  size_t num_enqueued() {
    const std::lock_guard lock(mutex_);
    return enqueued_.size();
  }

  // The end of an operation. Notes each time that a stream is ordered behind it.
  class NotingPoint final : public DevicePoint {
   public:
    NotingPoint(OperationQueueDeviceTest& test, uint64_t number) : test_(test), number_(number) {}
    Status order_current_stream() const override {
      const std::lock_guard lock(test_.mutex_);
      test_.ordered_.push_back({number_, std::this_thread::get_id()});
      return {};
    }

   private:
    OperationQueueDeviceTest& test_;
    const uint64_t number_;
  };

  std::mutex mutex_;
  std::vector<Completion> enqueued_;
  std::vector<std::thread::id> submitters_;
  // The number of each operation behind which a stream was ordered, and the thread whose stream.
  std::vector<std::pair<uint64_t, std::thread::id>> ordered_;
};

TEST_F(OperationQueueDeviceTest, AWaitOrdersTheStreamsAndTheOperationEndsLater) {
  OperationQueue& queue = start_device();
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> kept = owner;
  Operation operation = barrier_operation(2);
  operation.keep_alive = std::move(owner);
  const Work first = queue.issue(std::exchange(operation, {}));
  const Work second = queue.issue(barrier_operation());
  first.wait();
  second.wait(soon());
  Operation third = barrier_operation();
  queue.run(third);
  EXPECT_EQ(third.number, 4U);
  const std::thread::id self = std::this_thread::get_id();
  EXPECT_THAT(ordered_, ::testing::ElementsAre(std::pair(1U, self), std::pair(3U, self),
                                               std::pair(4U, self)));
  EXPECT_FALSE(first.is_completed());
  EXPECT_FALSE(kept.expired());
  std::future<void> ended = testing::future_of(first);
  EXPECT_FALSE(queue.drain(native_->deadline_in(milliseconds(10))));
  EXPECT_EQ(ended.wait_for(seconds(0)), std::future_status::timeout);
  enqueued_[0].complete(Error(ErrorCode::kInternal, "the device failed"));
  EXPECT_TRUE(first.is_completed());
  EXPECT_TRUE(kept.expired());
  for (const auto& wait :
       std::vector<std::function<void()>>{[&] { first.wait(); }, [&] { ended.get(); }}) {
    EXPECT_EQ(testing::failure_of(wait), "kInternal: the device failed");
  }
  enqueued_[2].complete({});
  EXPECT_TRUE(queue.has_pending());
  enqueued_[1].complete({});
  EXPECT_TRUE(queue.drain(soon()));
}

// issue_here() returns when the engine has the operation, also if another operation must end before
// that. So a caller's operations on two queues of one device are submitted in its order.
TEST_F(OperationQueueDeviceTest, AnOperationIsSubmittedWhenIssueHereReturns) {
  OperationQueue& queue = start([&](const Operation& operation) -> Completion {
    if (operation.number == 2) {
      native_->make_waiter()->park(native_->deadline_in(milliseconds(100)));
    }
    const std::lock_guard lock(mutex_);
    submitters_.push_back(std::this_thread::get_id());
    if (operation.number == 2) return Status();
    if (operation.number == 4) return Error(ErrorCode::kInternal, "the driver refused it");
    enqueued_.push_back(
        Completion::make_pending(std::make_shared<const NotingPoint>(*this, operation.number)));
    return enqueued_.back();
  });
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> kept = owner;
  Operation operation = barrier_operation();
  operation.keep_alive = std::move(owner);
  const Work first = queue.issue_here(std::exchange(operation, {}));
  EXPECT_EQ(num_enqueued(), 1U);  // no wait has begun
  const Work second = queue.issue(barrier_operation());
  const Work third = queue.issue_here(barrier_operation());
  EXPECT_TRUE(second.is_completed());
  EXPECT_EQ(num_enqueued(), 2U);
  EXPECT_FALSE(kept.expired());
  for (const Completion& completion : enqueued_) completion.complete({});
  EXPECT_TRUE(kept.expired());
  ASSERT_TRUE(queue.drain(soon()));  // no other thread is about to end an operation
  const Work fourth = queue.issue_here(barrier_operation());
  EXPECT_TRUE(fourth.is_completed());
  EXPECT_EQ(testing::failure_of([&] { fourth.wait(); }), "kInternal: the driver refused it");
  const std::thread::id self = std::this_thread::get_id();
  EXPECT_EQ(submitters_.size(), 4U);
  EXPECT_EQ(submitters_.front(), self);
  EXPECT_EQ(submitters_.back(), self);
  EXPECT_EQ(queue.num_issued(), 4U);
}

// The thread that runs the deleter submits the operation after it, so the deleter must not wait.
TEST_F(OperationQueueDeviceTest, ADeleterIssuesWithoutWaiting) {
  std::optional<Work> issued;
  OperationQueue& queue = start([&](const Operation& operation) -> Completion {
    if (operation.number == 1) return Status();
    return enqueue(operation);
  });
  Operation operation = barrier_operation();
  operation.keep_alive = std::shared_ptr<const void>(
      &queue, [&](const void*) { issued = queue.issue_here(barrier_operation()); });
  const Work first = queue.issue(std::exchange(operation, {}));
  first.wait(soon());
  ASSERT_TRUE(issued.has_value());
  issued->wait(soon());
  EXPECT_THAT(ordered_, ::testing::SizeIs(1));
}

TEST_F(OperationQueueDeviceTest, AClosedQueueIsIdleWhenItsEngineHasEndedWhatIsEnqueued) {
  OperationQueue& queue = start_device();
  const Work work = queue.issue(barrier_operation());
  work.wait();
  queue.close();
  EXPECT_FALSE(work.is_completed());
  EXPECT_FALSE(queue.is_idle());
  bool has_run = false;  // this thread sets it, because those of the queue have ended
  work.on_completed([&](const std::optional<Error>&) { has_run = true; });
  enqueued_[0].complete({});
  EXPECT_TRUE(has_run);
  EXPECT_TRUE(queue.is_idle());
  work.wait();
}

// wait() blocks until an operation has ended if it cannot be ordered on a stream. The next
// operation is enqueued before that.
TEST_F(OperationQueueDeviceTest, AWaitForAnEngineWithoutStreamsReturnsWhenTheResultIsThere) {
  OperationQueue& queue = start_device(false);
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  const Deadline deadline = soon();
  while (num_enqueued() < 2 && !deadline.has_passed(native_->now())) native_->yield();
  ASSERT_EQ(num_enqueued(), 2U);
  EXPECT_NE(testing::failure_of([&] { first.wait(native_->deadline_in(milliseconds(10))); }), "");
  std::atomic<bool> has_ended{false};
  const auto engine = native_->spawn("engine", [&] {
    native_->make_waiter()->park(native_->deadline_in(milliseconds(20)));
    has_ended = true;
    for (const Completion& completion : enqueued_) completion.complete({});
  });
  first.wait();
  EXPECT_TRUE(has_ended);
  second.wait();
  engine->join();
}

// A System whose threads start, cannot be started, or do nothing, as the test sets it.
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
            "kUnavailable: barrier was not issued: start thread \"cadre-progress\"");
  EXPECT_TRUE(queue.is_idle());
  EXPECT_EQ(queue.num_issued(), 0U);
  scarce_.is_scarce = false;
  const Work work = queue.issue(barrier_operation());
  work.wait(soon());
}

TEST_F(OperationQueueThreadTest, WithoutAThreadNoCallbackIsRegistered) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  const Work work = queue.issue(barrier_operation());
  scarce_.is_scarce = true;
  std::atomic<int> num_calls{0};
  const auto count = [&](const std::optional<Error>&) { ++num_calls; };
  EXPECT_EQ(testing::failure_of([&] { work.on_completed(count); }),
            "kUnavailable: a callback of barrier #1 was not registered: start thread "
            "\"cadre-callbacks\"");
  scarce_.is_scarce = false;
  work.on_completed(count);
  may_end = true;
  work.wait();
  EXPECT_EQ(num_calls, 1);
}

// If close() runs between the start of the thread and the return of issue(), the thread must still
// be joined.
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

// The queue's thread does nothing in this test, so the waiting caller runs the operation itself.
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
