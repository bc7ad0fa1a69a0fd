// Tests that the failure of a group withdraws all memory from the peers, even if some pieces cannot
// be withdrawn.
#include "cadre/core/comm/symmetric/one_sided_access.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

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

// The log sink belongs to the program, and may call the group. So no lock may be held while it is
// called.
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

// Two ranks of one process have separate mappings, as two processes have. After the failure rank 1
// writes through a pointer that it got before, while rank 0 has not closed the group. Rank 0 must
// not see that write.
TEST(OneSidedAccess, NothingThatAPeerWritesAfterAFailureShowsInLocal) {
  const auto common = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*common);
  std::latch has_failed(2);
  std::latch has_written(2);
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    const auto system = os::make_native_system();
    const Deadline limit = system->deadline_in(std::chrono::seconds(20));
    const auto group =
        Communicator::connect(*system, {context.rank, 2, 1, store, "token"}, {}, limit);
    const auto buffer = group->allocate_symmetric(20000);
    const Bytes of_zero = buffer->writable_peer(0);
    if (context.rank == 1) std::ranges::fill(of_zero, std::byte{5});
    // The barrier of rank 1 may be aborted, because rank 0 goes on when both ranks have entered.
    static_cast<void>(failure_of([&] { group->barrier(); }));
    if (context.rank == 0) {
      group->abort("a test");
      static_cast<void>(failure_of([&] { group->barrier(); }));
    }
    has_failed.arrive_and_wait();
    if (context.rank == 1) std::ranges::fill(of_zero, std::byte{0xEE});
    has_written.arrive_and_wait();
    const bool is_kept =
        std::ranges::all_of(buffer->local(), [](std::byte value) { return value == std::byte{5}; });
    testing::require(is_kept || context.rank == 1, "what rank 1 wrote before, and nothing later");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
