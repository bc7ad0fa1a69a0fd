// What the failure of a group withdraws when single pieces cannot be withdrawn.
#include "cadre/comm/symmetric/one_sided_access.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using testing::failure_of;

Error first_failure() {
  return {ErrorCode::kTimeout, "rank 2 is late"};
}

class WithdrawnMemory final : public OneSidedAccess::Memory {
 public:
  explicit WithdrawnMemory(std::function<Status()> outcome = [] { return Status(); })
      : outcome_(std::move(outcome)) {}
  Status withdraw(std::string_view reason) override {
    reason_ = reason;
    return outcome_();
  }
  const std::string& reason() const { return reason_; }

 private:
  const std::function<Status()> outcome_;
  std::string reason_;
};

class AskingLog final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view message) override {
    text += message;
    if (ask) ask();
  }
  std::string text;
  std::function<void()> ask;
};

TEST(OneSidedAccess, APieceThatCannotBeWithdrawnLeavesNoOtherWithinReach) {
  const auto log = std::make_shared<AskingLog>();
  OneSidedAccess access(log);
  const auto full = std::make_shared<WithdrawnMemory>(
      [] { return Status(Error(ErrorCode::kUnavailable, "no pages")); });
  const auto thrower =
      std::make_shared<WithdrawnMemory>([]() -> Status { throw std::bad_alloc(); });
  const auto last = std::make_shared<WithdrawnMemory>();
  access.add(full);
  access.add(thrower);
  access.add(last);
  access.end(first_failure());
  EXPECT_EQ(last->reason(), "rank 2 is late");
  EXPECT_NE(log->text.find("do not use its content"), std::string::npos) << log->text;
  EXPECT_EQ(failure_of([&] { access.check(); }), "kTimeout: rank 2 is late");
}

// The sink is the program's: it may look at the group.
TEST(OneSidedAccess, TheLogMayAskForTheFailure) {
  const auto log = std::make_shared<AskingLog>();
  OneSidedAccess access(log);
  const auto full = std::make_shared<WithdrawnMemory>(
      [] { return Status(Error(ErrorCode::kUnavailable, "no pages")); });
  access.add(full);
  std::string failure;
  log->ask = [&] { failure = failure_of([&] { access.check(); }); };
  access.end(first_failure());
  EXPECT_EQ(failure, "kTimeout: rank 2 is late");
}

TEST(OneSidedAccess, MemoryOfAFailedGroupIsWithdrawnWhenItIsAdded) {
  OneSidedAccess access(nullptr);
  access.check();
  access.end(first_failure());
  access.end(Error(ErrorCode::kAborted, "a later one"));
  const auto late = std::make_shared<WithdrawnMemory>();
  access.add(late);
  EXPECT_EQ(late->reason(), "rank 2 is late");
}

}  // namespace
}  // namespace cadre
