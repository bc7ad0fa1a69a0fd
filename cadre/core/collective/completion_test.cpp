// Tests completions that are done at once, and completions that are completed later: a callback
// runs once, and not under a lock.
#include "cadre/core/collective/completion.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "cadre/core/os/system.h"

namespace cadre {
namespace {

Error failure() {
  return Error(ErrorCode::kUnavailable, "the device is gone");
}

TEST(CompletionTest, OneThatIsDoneRunsCallbacksAtOnceAndNeedsNoStream) {
  const Completion completion = failure();
  std::string seen;
  completion.on_done([&](const Status& status) { seen = status.error().message(); });
  EXPECT_EQ(seen, "the device is gone");
  EXPECT_TRUE(completion.is_done() && completion.is_stream_ordered());
  EXPECT_EQ(completion.order_current_stream().error(), failure());
  EXPECT_TRUE(Completion(Status()).order_current_stream().ok());
}

TEST(CompletionTest, ACopyCompletesThePendingOneWithItsStatus) {
  const Completion completion = Completion::make_pending();
  const Completion copy = completion;
  int num_calls = 0;
  completion.on_done([&](const Status& status) { num_calls += status.ok() ? 100 : 1; });
  EXPECT_FALSE(completion.is_done() || completion.is_stream_ordered());
  EXPECT_EQ(num_calls, 0);
  copy.complete(failure());
  EXPECT_TRUE(completion.is_done());
  EXPECT_EQ(completion.status().error(), failure());
  completion.on_done([&](const Status&) { ++num_calls; });
  EXPECT_EQ(num_calls, 2);
}

TEST(CompletionTest, ACallbackMayUseTheCompletion) {
  const Completion completion = Completion::make_pending();
  bool is_inner_called = false;
  completion.on_done([&](const Status&) {
    completion.on_done([&](const Status& status) { is_inner_called = status.ok(); });
  });
  completion.complete({});
  EXPECT_TRUE(is_inner_called);
  // Now the completion is done already, so the callback runs at once.
  is_inner_called = false;
  completion.on_done([&](const Status&) {
    completion.on_done([&](const Status& status) { is_inner_called = status.ok(); });
  });
  EXPECT_TRUE(is_inner_called);
}

TEST(CompletionTest, OrdersTheCurrentStreamUntilItIsDone) {
  struct CountingPoint final : DevicePoint {
    Status order_current_stream() const override {
      ++num_ordered;
      return num_ordered < 3 ? Status() : Error(ErrorCode::kInternal, "the driver has an error");
    }
    mutable int num_ordered = 0;
  };
  const auto end = std::make_shared<const CountingPoint>();
  const Completion completion = Completion::make_pending(end);
  EXPECT_TRUE(completion.is_stream_ordered() && !completion.is_done());
  EXPECT_EQ(completion.end(), end);
  EXPECT_TRUE(completion.order_current_stream().ok());
  EXPECT_TRUE(completion.order_current_stream().ok());
  EXPECT_FALSE(completion.order_current_stream().ok());
  EXPECT_EQ(end->num_ordered, 3);
  completion.complete({});
  EXPECT_TRUE(completion.order_current_stream().ok());
  EXPECT_EQ(end->num_ordered, 3);
  EXPECT_EQ(completion.end(), nullptr);
  const Completion failed = Completion::make_pending(end);
  failed.complete(Error(ErrorCode::kInternal, "the engine has failed"));
  EXPECT_FALSE(failed.order_current_stream().ok());
  EXPECT_EQ(end->num_ordered, 3);
}

TEST(CompletionTest, EveryCallbackRunsOnceWhileAnotherThreadCompletes) {
  const auto system = os::make_native_system();
  for (int round = 0; round < 200; ++round) {
    const Completion completion = Completion::make_pending();
    std::atomic<int> num_calls{0};
    const auto completer = system->spawn("completer", [completion] { completion.complete({}); });
    for (int i = 0; i < 20; ++i) completion.on_done([&](const Status&) { ++num_calls; });
    completer->join();
    EXPECT_EQ(num_calls, 20);
  }
}

}  // namespace
}  // namespace cadre
