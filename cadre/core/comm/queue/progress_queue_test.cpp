// Tests callbacks of operations and their exceptions, the deadline of a wait, and the name of the
// call in errors.
#include "cadre/core/comm/queue/progress_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/scripted_queue.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::barrier_operation;
using testing::future_of;
using ::testing::HasSubstr;
using testing::out_of_memory_at_first;

// The timeout of a wait in a callback. It must expire before the wait of the test itself.
constexpr Duration kCallbackPatience = seconds(2);

class OperationQueueCallsTest : public testing::OperationQueueTest {};

// The callback sets a promise, which can be set only once, so a second call of the callback would
// throw.
TEST_F(OperationQueueCallsTest, CallbacksMakeFutures) {
  OperationQueue& queue = start(out_of_memory_at_first);
  const Work first = queue.issue(barrier_operation());
  std::future<void> before = future_of(first);
  std::future<void> of_second = future_of(queue.issue(barrier_operation()));
  of_second.get();
  std::future<void> after = future_of(first);
  EXPECT_EQ(after.wait_for(seconds(0)), std::future_status::ready);
  for (std::future<void>* future : {&before, &after}) {
    EXPECT_EQ(testing::failure_of([&] { future->get(); }), "kUnavailable: out of memory");
  }
}

// An operation is run by the queue's thread or by a waiting caller. In both cases its callback runs
// without a lock and without the progress role, so it may even wait.
TEST_F(OperationQueueCallsTest, ACallbackMayUseTheQueue) {
  OperationQueue& queue = start([](const Operation&) { return Status(); });
  for (const bool is_awaited : {false, true}) {
    const uint64_t num_before = queue.num_issued();
    std::promise<bool> was_free;
    std::unique_ptr<os::Thread> user;
    const Work work = queue.issue(barrier_operation());
    work.on_completed([&](const std::optional<Error>&) {
      std::atomic<bool> has_answer{false};
      user = native_->spawn("user", [&] {
        Operation blocking = barrier_operation();
        queue.run(blocking);
        queue.issue(barrier_operation()).wait();
        has_answer = true;
      });
      const Deadline deadline = native_->deadline_in(seconds(2));
      while (!has_answer && !deadline.has_passed(native_->now())) native_->yield();
      const bool was_free_now = has_answer;
      user->join();
      was_free.set_value(was_free_now);
    });
    if (is_awaited) work.wait();
    EXPECT_TRUE(was_free.get_future().get());
    EXPECT_EQ(queue.num_issued(), num_before + 3);
  }
}

// wait() must throw the exception object of the callback itself, not an error that describes it.
// The queue must stay usable.
TEST_F(OperationQueueCallsTest, AWaitThrowsWhatACallbackThrew) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  const Work work = queue.issue(barrier_operation());
  struct UsersOwn {
    int value;
  };
  std::atomic<bool> may_throw{false};
  work.on_completed([&](const std::optional<Error>&) {
    while (!may_throw) native_->yield();
    throw UsersOwn{5};
  });
  bool has_second_run = false;
  work.on_completed([&](const std::optional<Error>&) {
    has_second_run = true;
    throw std::logic_error("the second one");
  });
  may_end = true;
  while (!work.is_completed()) native_->yield();
  const auto releaser = native_->spawn("releaser", [&] { may_throw = true; });
  for (int i = 0; i < 2; ++i) {
    try {
      work.wait(soon());
      ADD_FAILURE() << "the exception of the callback is lost";
    } catch (const UsersOwn& thrown) {
      EXPECT_EQ(thrown.value, 5);
    }
    EXPECT_TRUE(has_second_run) << "wait() has returned before a callback";
  }
  releaser->join();
  EXPECT_FALSE(work.error().has_value());
  queue.issue(barrier_operation()).wait(soon());
  EXPECT_THAT(log_text(),
              AllOf(HasSubstr("barrier #1 on group \"world\", rank 0: a callback threw, which "
                              "Work::wait() throws again: an exception that is no std::exception"),
                    HasSubstr("the second one")));
  // The operation has ended, so the exception goes to the caller of on_completed().
  EXPECT_THROW(work.on_completed([](const std::optional<Error>&) { throw std::logic_error(""); }),
               std::logic_error);
}

// The caller waits for the failure of the operation. The exception of the callback may be a
// consequence of it.
TEST_F(OperationQueueCallsTest, TheErrorOfTheOperationComesBeforeThatOfItsCallback) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation& operation) {
    while (!may_end) native_->yield();
    return out_of_memory_at_first(operation);
  });
  const Work work = queue.issue(barrier_operation());
  work.on_completed([](const std::optional<Error>&) { throw std::logic_error("a consequence"); });
  may_end = true;
  EXPECT_EQ(testing::failure_of([&] { work.wait(soon()); }), "kUnavailable: out of memory");
  EXPECT_THAT(log_text(), HasSubstr("a consequence"));
}

// The callback of the operation still runs, but the operation has ended. So a timeout would be
// wrong.
TEST_F(OperationQueueCallsTest, ATimedWaitForAFailedOperationThrowsItsError) {
  std::atomic<bool> may_end{false};
  std::atomic<bool> may_return{false};
  OperationQueue& queue = start([&](const Operation& operation) {
    while (!may_end) native_->yield();
    return out_of_memory_at_first(operation);
  });
  const Work work = queue.issue(barrier_operation());
  work.on_completed([&](const std::optional<Error>&) {
    while (!may_return) native_->yield();
  });
  may_end = true;
  while (!work.is_completed()) native_->yield();
  EXPECT_EQ(testing::failure_of([&] { work.wait(std::chrono::milliseconds(20)); }),
            "kUnavailable: out of memory");
  may_return = true;
  EXPECT_EQ(testing::failure_of([&] { work.wait(soon()); }), "kUnavailable: out of memory");
}

// The callback of the second operation runs within that of the first, which waits for the second
// operation. If a wait included callbacks, the outer callback would wait for itself.
TEST_F(OperationQueueCallsTest, ACallbackWaitsForOperationsNotForTheirCallbacks) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  std::atomic<int> num_waited{0};
  first.on_completed([&](const std::optional<Error>&) {
    second.wait();
    ++num_waited;
  });
  second.on_completed([&](const std::optional<Error>&) {
    first.wait(seconds(2));
    ++num_waited;
  });
  may_end = true;
  for (const Work& work : {first, second}) work.wait(soon());
  EXPECT_EQ(num_waited, 2);
  EXPECT_EQ(log_text(), "");
}

// A wait with a timeout runs no operation, so another thread must run the operation for which it
// waits.
TEST_F(OperationQueueCallsTest, ATimedWaitInACallbackEndsWithItsOperation) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  const Work first = queue.issue(barrier_operation());
  first.on_completed([&](const std::optional<Error>&) {
    queue.issue(barrier_operation()).wait(kCallbackPatience);
  });
  may_end = true;
  EXPECT_EQ(testing::failure_of([&] { first.wait(soon()); }), "");
  EXPECT_EQ(queue.num_issued(), 2U);
}

// One thread of the engine completes both operations, so a callback that waits must not run in that
// thread.
TEST_F(OperationQueueCallsTest, ACallbackWaitsForAnOperationThatItsEngineEndsLater) {
  const std::vector<Completion> enqueued = {Completion::make_pending(), Completion::make_pending()};
  OperationQueue& queue =
      start([&](const Operation& operation) { return enqueued[operation.number - 1]; });
  const Work first = queue.issue(barrier_operation());
  const Work second = queue.issue(barrier_operation());
  first.on_completed([&](const std::optional<Error>&) { second.wait(kCallbackPatience); });
  const auto engine = native_->spawn("engine", [&] {
    for (const Completion& completion : enqueued) completion.complete({});
  });
  EXPECT_EQ(testing::failure_of([&] { first.wait(soon()); }), "");
  engine->join();
}

// Callbacks run one after the other, in the order in which the operations end.
TEST_F(OperationQueueCallsTest, CallbacksRunInOneThreadThatHasNoOtherDuty) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  std::vector<Work> works;
  std::vector<std::thread::id> threads;
  std::vector<size_t> order;
  for (size_t i = 0; i < 3; ++i) {
    works.push_back(queue.issue(barrier_operation()));
    works.back().on_completed([&, i](const std::optional<Error>&) {
      threads.push_back(std::this_thread::get_id());
      order.push_back(i);
    });
  }
  may_end = true;
  for (const Work& work : works) work.wait();
  EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2}));
  EXPECT_EQ(threads, std::vector<std::thread::id>(3, threads.front()));
  EXPECT_NE(threads.front(), std::this_thread::get_id());
}

TEST_F(OperationQueueCallsTest, ATimeoutOfAWaitNamesTheOperationAndWhatMayBeDone) {
  std::atomic<bool> may_end{false};
  OperationQueue& queue = start([&](const Operation&) {
    while (!may_end) native_->yield();
    return Status();
  });
  Operation operation = barrier_operation();
  operation.call = "rejoin_async";
  const Work work = queue.issue(operation);
  try {
    work.wait(milliseconds(1));
    ADD_FAILURE() << "it has not ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_EQ(error.details().operation, "rejoin_async");
    EXPECT_EQ(error.details().operation_number, 1U);
    EXPECT_EQ(error.details().group, "world");
    EXPECT_EQ(error.message(),
              "rejoin_async (barrier #1) on group \"world\", rank 0: wait() has reached its "
              "deadline: the operation has not ended; it goes on until its own deadline, and the "
              "group is usable. Remedy: wait again, or abort() the group");
  }
  may_end = true;
  work.wait(soon());
}

// Returns a failure of a group with the message that failure/diagnosis.h composes.
Error failure_of_barrier(uint64_t number) {
  return Error(ErrorCode::kTimeout, format("barrier #{} on group \"world\" timed out", number))
      .with_details({.operation = "barrier", .operation_number = number});
}

TEST_F(OperationQueueCallsTest, AnErrorNamesTheCallThatTheProgramMade) {
  const auto message_of = [this](std::string_view call, uint64_t number_that_failed) {
    OperationQueue& queue =
        start([=](const Operation&) { return Completion(failure_of_barrier(number_that_failed)); });
    Operation operation = barrier_operation(2);
    operation.call = call;
    std::vector<std::string> texts;
    const auto note = [&](const std::function<void()>& wait) {
      try {
        wait();
      } catch (const Error& error) {
        texts.push_back(error.details().operation + ": " + error.message());
      }
    };
    note([&] { queue.run(operation); });
    queue.close();
    OperationQueue& later =
        start([=](const Operation&) { return Completion(failure_of_barrier(number_that_failed)); });
    const Work work = later.issue(operation);
    note([&] { work.wait(soon()); });
    EXPECT_EQ(work.error()->message() + "|" + texts.at(1),
              work.error()->message() + "|" + texts.at(0));
    later.close();
    return texts.at(0);
  };
  EXPECT_EQ(message_of("split", 2), "split: split (barrier #2) on group \"world\" timed out");
  EXPECT_EQ(message_of("barrier_async", 1), "barrier: barrier #1 on group \"world\" timed out");
  EXPECT_EQ(message_of("", 1), "barrier: barrier #1 on group \"world\" timed out");
  // The failure belongs to another call, of which this call only learns, so the error names that
  // other call.
  EXPECT_EQ(message_of("split", 3), "barrier: barrier #3 on group \"world\" timed out");
}

}  // namespace
}  // namespace cadre
