#include "cadre/launch/hosts/registry_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cadre/testing/core/log_lines.h"

namespace cadre::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A registry that outlives the watch of each agent.
struct Shared {
  std::mutex mutex;
  std::optional<Claim> claim;
  bool is_silent = false;
  int num_calls = 0;
  int num_releases = 0;
};

class FakeRegistry final : public CoordinatorRegistry {
 public:
  explicit FakeRegistry(Shared& shared) : shared_(shared) {}

  Result<std::optional<Claim>> find(Deadline /*deadline*/) override {
    const std::lock_guard lock(shared_.mutex);
    ++shared_.num_calls;
    if (shared_.is_silent) return Error(ErrorCode::kUnavailable, "it does not answer");
    return shared_.claim;
  }
  Result<std::optional<Claim>> claim(const Claim& own, Deadline deadline) override {
    const auto present = find(deadline);
    if (!present.ok()) return present;
    const std::lock_guard lock(shared_.mutex);
    if (!shared_.claim || replaces(own, *shared_.claim)) shared_.claim = own;
    return shared_.claim;
  }
  Status release(AgentId agent, Deadline /*deadline*/) override {
    const std::lock_guard lock(shared_.mutex);
    ++shared_.num_releases;
    if (shared_.claim && shared_.claim->agent == agent) shared_.claim.reset();
    return {};
  }
  Duration validity() const override { return milliseconds(500); }

 private:
  Shared& shared_;
};

class RegistryWatchTest : public ::testing::Test {
 protected:
  using Wish = RegistryWatch::Wish;

  void watch(Wish::Kind kind) {
    watch_ = std::make_unique<RegistryWatch>(
        *system_,
        RegistryWatch::Options{.agent = own_.agent,
                               .name = "the registry",
                               .registry = std::make_unique<FakeRegistry>(shared_),
                               .first_wish = {.kind = kind, .own = own_},
                               .interval = milliseconds(20)},
        *wake_up_, log_);
  }
  template <typename T>
  void change(T Shared::*member, T value) {
    const std::lock_guard lock(shared_.mutex);
    shared_.*member = std::move(value);
  }
  template <typename T>
  T value_of(T Shared::*member) {
    const std::lock_guard lock(shared_.mutex);
    return shared_.*member;
  }
  ::testing::AssertionResult comes(const std::function<bool()>& holds) {
    const Deadline deadline = system_->deadline_in(seconds(20));
    while (!holds()) {
      if (deadline.has_passed(system_->now())) return ::testing::AssertionFailure();
      std::array items = {os::PollItem{.target = wake_up_.get(), .want_read = true}};
      system_->poll(items, system_->deadline_in(milliseconds(5)));
      wake_up_->clear();
    }
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult answers(const std::string& address) {
    return comes([&] { return watch_->answer(system_->now()) == address; });
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::unique_ptr<os::Event> wake_up_ = system_->make_event();
  testing::LogLines log_;
  Shared shared_;
  const Claim own_ = {.agent = 1, .address = "own:1"};
  const Claim other_ = {.agent = 2, .address = "other:1"};
  std::unique_ptr<RegistryWatch> watch_;
};

TEST_F(RegistryWatchTest, AnswersWithTheClaimInForceAndRemovesItsOwnInTheEnd) {
  watch(Wish::Kind::kClaim);
  EXPECT_TRUE(answers("own:1"));
  watch_.reset();
  EXPECT_EQ(value_of(&Shared::claim), std::nullopt);
  change(&Shared::claim, std::optional(other_));
  watch(Wish::Kind::kClaim);
  EXPECT_TRUE(answers("other:1"));
  change(&Shared::claim, std::optional<Claim>());
  EXPECT_TRUE(answers("own:1"));
}

// The thread of the watch wakes the owner after it has stored an answer, so the wake-up of the
// first answer may come after the first look at it.
TEST_F(RegistryWatchTest, AnotherAnswerWakesTheOwner) {
  watch(Wish::Kind::kFind);
  EXPECT_TRUE(answers(""));
  change(&Shared::claim, std::optional(other_));
  for (int wakes = 0; wakes < 2 && watch_->answer(system_->now()) != "other:1"; ++wakes) {
    std::array items = {os::PollItem{.target = wake_up_.get(), .want_read = true}};
    EXPECT_TRUE(system_->poll(items, system_->deadline_in(seconds(20)))) << "nothing wakes it";
    wake_up_->clear();
  }
  EXPECT_EQ(watch_->answer(system_->now()), "other:1");
}

TEST_F(RegistryWatchTest, AnOwnClaimIsNotCertainForLongWhenTheRegistryIsSilent) {
  watch(Wish::Kind::kClaim);
  EXPECT_TRUE(answers("own:1"));
  change(&Shared::is_silent, true);
  EXPECT_TRUE(answers(""));
  change(&Shared::is_silent, false);
  EXPECT_TRUE(answers("own:1"));
}

TEST_F(RegistryWatchTest, TheAddressOfAnotherStaysKnownWhenTheRegistryIsSilentAndOneLineSaysSo) {
  change(&Shared::claim, std::optional(other_));
  watch(Wish::Kind::kFind);
  EXPECT_TRUE(answers("other:1"));
  change(&Shared::is_silent, true);
  const int num_calls = value_of(&Shared::num_calls);
  EXPECT_TRUE(comes([&] { return value_of(&Shared::num_calls) >= num_calls + 30; }));
  EXPECT_EQ(watch_->answer(system_->now()), "other:1");
  change(&Shared::is_silent, false);
  EXPECT_TRUE(comes([&] { return log_.get().size() >= 2; }));
  EXPECT_THAT(log_.get(),
              ElementsAre(HasSubstr("the registry: it does not answer; hosts that come"),
                          HasSubstr("the registry answers again")));
}

TEST_F(RegistryWatchTest, AClaimThatIsNotWishedAnyMoreIsRemovedAndNoAnswer) {
  watch(Wish::Kind::kClaim);
  EXPECT_TRUE(answers("own:1"));
  watch_->wish({.kind = Wish::Kind::kNone});
  EXPECT_EQ(watch_->answer(system_->now()), "");
  EXPECT_TRUE(comes([&] { return value_of(&Shared::claim) == std::nullopt; }));
  const int num_calls = value_of(&Shared::num_calls);
  watch_->wish({.kind = Wish::Kind::kFind});
  EXPECT_TRUE(comes([&] { return value_of(&Shared::num_calls) > num_calls + 2; }));
  EXPECT_EQ(value_of(&Shared::num_releases), 1);
}

TEST_F(RegistryWatchTest, AClaimThatWasReplacedIsNotTheAnswer) {
  watch(Wish::Kind::kClaim);
  EXPECT_TRUE(answers("own:1"));
  change(&Shared::claim, std::optional(other_));
  EXPECT_TRUE(answers("other:1"));
  Claim later = own_;
  later.round = 1;
  watch_->wish({.kind = Wish::Kind::kClaim, .own = later});
  EXPECT_TRUE(answers("own:1"));
}

}  // namespace
}  // namespace cadre::launch
