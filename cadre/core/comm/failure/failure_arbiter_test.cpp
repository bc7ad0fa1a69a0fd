// Tests the failure arbiter with every order of its events, without threads.
#include "cadre/core/comm/failure/failure_arbiter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using wire::Activity;
using wire::ActivityState;

Roster roster_of_four() {
  return {
      "world", 0, std::make_shared<const Layout>(std::vector<wire::RankAddress>(4)), {0, 1, 2, 3}};
}

Activity doing(ActivityState state, OpKind kind = OpKind::kBarrier, uint64_t number = 0) {
  Activity activity;
  activity.state = state;
  activity.number = number;
  activity.fingerprint = OpDescriptor{.kind = kind}.fingerprint();
  return activity;
}

Failure failure_by(int culprit) {
  return {ErrorCode::kPeerLost, culprit, "lost", {}};
}

constexpr int kFound = 1;  // the culprit that the investigation finds
constexpr int kReportedByA = 2;
constexpr int kReportedByB = 3;
constexpr Duration kPatience = seconds(100);

enum class Event { kClaim, kReportA, kReportB, kConclude, kExpire };
using Order = std::array<Event, 5>;

std::string describe(const Order& order) {
  constexpr std::array<std::string_view, 5> kNames{"claim", "A", "B", "conclude", "expire"};
  std::string text;
  for (const Event event : order) text += format(" {}", kNames[static_cast<size_t>(event)]);
  return text;
}

// Runs the events in the given order, one each second, and publishes failures as the monitor does.
class Play {
 public:
  explicit Play(Duration patience) : patience_(patience) {}

  void run(const Order& order) {
    for (const Event event : order) {
      now_ = now_ + seconds(1);
      run(event);
      publish_if_decided();
    }
    now_ = now_ + patience_;
    publish_if_decided();
  }
  int num_published() const { return num_published_; }
  std::optional<Rank> culprit() { return arbiter_.error({}).details().culprit; }

 private:
  void run(Event event) {
    switch (event) {
      case Event::kClaim:
        is_claimant_ = arbiter_.claim();
        return;
      case Event::kReportA:
        return report(failure_by(kReportedByA));
      case Event::kReportB:
        return report(failure_by(kReportedByB));
      case Event::kConclude:
        if (is_claimant_) arbiter_.conclude({failure_by(kFound), patience_}, now_);
        return;
      case Event::kExpire:
        now_ = now_ + patience_;
    }
  }
  void report(const Failure& failure) {
    if (arbiter_.report(failure, now_)) publish(failure);
  }
  void publish_if_decided() {
    if (num_published_ == 0 && arbiter_.is_decided(now_)) publish(arbiter_.decided());
  }
  void publish(const Failure& failure) {
    ++num_published_;
    arbiter_.publish(arbiter_.explain(failure, {}));
  }

  const Duration patience_;
  TimePoint now_;
  FailureArbiter arbiter_{roster_of_four(), ""};
  bool is_claimant_ = false;
  int num_published_ = 0;
};

// Returns the culprit that must be published. If a report comes before the claim, it is that of the
// report. If the claim comes first, it is that of its finding, unless the finding is uncertain and
// a report arrives before the patience expires.
int expected_culprit(const Order& order, bool is_certain) {
  const auto place_of = [&](Event event) {
    return std::ranges::find(order, event) - order.begin();
  };
  const auto a = place_of(Event::kReportA);
  const auto b = place_of(Event::kReportB);
  const int first_report = a < b ? kReportedByA : kReportedByB;
  if (std::min(a, b) < place_of(Event::kClaim)) return first_report;
  if (is_certain) return kFound;
  const auto expiry = place_of(Event::kExpire);
  const bool has_expired_before = place_of(Event::kConclude) < expiry && expiry < std::min(a, b);
  return has_expired_before ? kFound : first_report;
}

TEST(FailureArbiter, InEveryOrderOfEventsOneFailureIsPublished) {
  Order order{Event::kClaim, Event::kReportA, Event::kReportB, Event::kConclude, Event::kExpire};
  int num_orders = 0;
  do {
    // An investigation cannot end before it has begun.
    if (std::ranges::find(order, Event::kConclude) < std::ranges::find(order, Event::kClaim)) {
      continue;
    }
    for (const bool is_certain : {false, true}) {
      SCOPED_TRACE(format("{}{}", is_certain ? "certain:" : "uncertain:", describe(order)));
      Play play(is_certain ? Duration(0) : kPatience);
      play.run(order);
      EXPECT_EQ(play.num_published(), 1);
      EXPECT_EQ(play.culprit(), expected_culprit(order, is_certain));
    }
    ++num_orders;
  } while (std::ranges::next_permutation(order).found);
  EXPECT_EQ(num_orders, 60);
}

TEST(FailureArbiter, APatienceIncludesItsLastMoment) {
  for (const int late_ns : {0, 1}) {
    FailureArbiter arbiter(roster_of_four(), "");
    ASSERT_TRUE(arbiter.claim());
    EXPECT_FALSE(arbiter.is_decided(TimePoint{}));
    const TimePoint end = TimePoint{} + kPatience;
    arbiter.conclude({failure_by(kFound), kPatience}, TimePoint{});
    EXPECT_FALSE(arbiter.is_decided(TimePoint{end.ns - 1}));
    EXPECT_TRUE(arbiter.is_decided(end));
    EXPECT_FALSE(arbiter.report(failure_by(kReportedByA), TimePoint{end.ns + late_ns}));
    EXPECT_EQ(arbiter.decided().culprit, late_ns == 0 ? kReportedByA : kFound);
  }
}

TEST(FailureArbiter, APublishedFailureIsFinal) {
  FailureArbiter arbiter(roster_of_four(), "");
  EXPECT_EQ(arbiter.error({}).code(), ErrorCode::kInternal);
  EXPECT_EQ(arbiter.phase(), FailureArbiter::Phase::kNone);
  ASSERT_TRUE(arbiter.report(failure_by(1), TimePoint{}));
  EXPECT_EQ(arbiter.phase(), FailureArbiter::Phase::kClaimed);
  arbiter.publish(arbiter.explain(failure_by(1), {}));
  EXPECT_EQ(arbiter.phase(), FailureArbiter::Phase::kPublished);
  EXPECT_FALSE(arbiter.claim());
  EXPECT_FALSE(arbiter.report(failure_by(2), TimePoint{}));
  arbiter.publish(arbiter.explain(failure_by(2), {}));
  EXPECT_EQ(arbiter.error({}).details().culprit, 1);
}

// A test case: the operation that this rank runs when a failure is published, its last collective
// when the error is read, and the number of the operation that the error must name.
struct Attribution {
  std::string_view name;
  Activity own;
  Activity last;
  std::optional<uint64_t> expected;
  bool is_open = false;  // true: the attribution may change until the collective has ended
};

std::vector<Attribution> attributions() {
  const auto collective = [](ActivityState state, uint64_t number) {
    return doing(state, OpKind::kAllReduce, number);
  };
  using enum ActivityState;
  const Activity fifth = collective(kRunning, 5);
  const Activity message = doing(kRunning, OpKind::kRecv, 5);
  return {
      {"nothing ran yet", doing(kNothingYet), doing(kNothingYet), {}},
      {"the last one was over", collective(kDone, 4), collective(kDone, 4), {}},
      {"the last one had failed", collective(kFailed, 4), collective(kFailed, 4), {}},
      {"the next one began later", collective(kDone, 4), fifth, {}},
      {"it still runs", fifth, fifth, 5, true},
      {"it failed", fifth, collective(kFailed, 5), 5, true},
      {"it succeeded", fifth, collective(kDone, 5), {}, true},
      {"it succeeded and the next one runs", fifth, collective(kRunning, 6), 6, true},
      {"it and the next one succeeded", fifth, collective(kDone, 6), {}, true},
      {"it succeeded and the next one failed", fifth, collective(kFailed, 6), {}, true},
      {"a message is not compared with collectives", message, collective(kDone, 5), 5},
      {"a message is not compared with later collectives", message, collective(kRunning, 6), 5},
  };
}

TEST(FailureArbiter, AnErrorNamesTheOperationThatItEnded) {
  for (const Attribution& given : attributions()) {
    SCOPED_TRACE(given.name);
    FailureArbiter arbiter(roster_of_four(), "");
    const ExplainedFailure explained = arbiter.explain(failure_by(1), given.own);
    EXPECT_EQ(explained.is_attribution_open, given.is_open);
    const bool is_named_at_once = given.own.state == ActivityState::kRunning;
    EXPECT_EQ(explained.error.details().operation_number.has_value(), is_named_at_once);
    EXPECT_EQ(explained.logged.details().operation_number.has_value(),
              is_named_at_once && !given.is_open);
    EXPECT_TRUE(explained.logged.message().starts_with(explained.sentence));
    arbiter.publish(explained);
    const auto operation_at = [&](const Activity& last) {
      return arbiter.error(last).details().operation_number;
    };
    EXPECT_EQ(operation_at(given.last), given.expected);
    const bool may_still_succeed = given.is_open && given.expected == 5U;
    if (may_still_succeed) continue;
    EXPECT_EQ(operation_at(doing(ActivityState::kDone, OpKind::kBarrier, 9)), given.expected);
  }
}

// If a failure names its operation, as a timeout does, it is not attributed to another one.
TEST(FailureArbiter, AnOperationThatTheFailureNamesStays) {
  for (const Attribution& given : attributions()) {
    SCOPED_TRACE(given.name);
    FailureArbiter arbiter(roster_of_four(), "");
    Failure failure = failure_by(1);
    failure.operation = doing(ActivityState::kRunning, OpKind::kSend, 3);
    const ExplainedFailure explained = arbiter.explain(failure, given.own);
    EXPECT_FALSE(explained.is_attribution_open);
    EXPECT_EQ(explained.logged, explained.error);
    arbiter.publish(explained);
    EXPECT_EQ(arbiter.error(given.last).details().operation, "send");
    EXPECT_EQ(arbiter.error(given.last).details().operation_number, 3U);
  }
}

// Ranks that share no group with the late rank wait for a rank that does. So the messages of all
// ranks together must lead to the late rank.
TEST(FailureArbiter, ARankWhoseGroupIsAbortedNamesTheRankThatItWaitedFor) {
  const FailureArbiter arbiter(roster_of_four(), "");
  const auto message = [&](const Failure& failure, int waiting_for) {
    Activity own = doing(ActivityState::kRunning, OpKind::kAllReduce, 3);
    own.waiting_for = waiting_for;
    return arbiter.explain(failure, own).error.message();
  };
  const auto naming = [](int rank) {
    return ::testing::HasSubstr(
        "all_reduce #3 on group \"world\" was aborted after 0 ms on rank 0 (, "
        "pid 0)" +
        (rank < 0 ? "" : format(", waiting for rank {} (, pid 0)", rank)) + "\n  first failure");
  };
  Failure failure{.code = ErrorCode::kAborted, .cause = "first failure: a timeout"};
  EXPECT_THAT(message(failure, 2), naming(2));
  EXPECT_THAT(message(failure, -1), naming(-1));
  EXPECT_THAT(message(failure, 4), naming(-1)) << "no rank of the group";
  failure.culprit = 2;  // the cause names the rank already
  EXPECT_THAT(message(failure, 2), naming(-1));
  EXPECT_THAT(message(failure, 3), naming(3));
  failure.code = ErrorCode::kPeerLost;
  EXPECT_THAT(message(failure, 3), ::testing::Not(::testing::HasSubstr("waiting for")));
}

}  // namespace
}  // namespace cadre
