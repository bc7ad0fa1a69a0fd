// Tests connection attempts of the control plane that are cancelled, or that this process cannot
// begin.
#include "cadre/core/fabric/plane/dialer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/callers.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/fabric/bootstrap/listening.h"
#include "cadre/testing/core/forwarding_system.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class FewThreads final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
    if (num_refused++ == 0) throw Error(ErrorCode::kUnavailable, "spawn: no thread is left");
    return inner_.spawn(std::move(name), std::move(body));
  }
  int num_refused = 0;
};

class FewDescriptors final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override {
    if (num_refused++ >= num_to_refuse) return inner_.connect(address, deadline);
    return Error(ErrorCode::kUnavailable, "no descriptor").with_details({.is_own_limit = true});
  }
  std::atomic<int> num_refused = 0;
  int num_to_refuse = 1;
};

// Rank 0 connects to rank 1 of the same host. The test runs both ends.
class DialerTest : public ::testing::Test {
 protected:
  DialerTest() {
    const Membership membership{0, 2, 1, nullptr, "token"};
    for (const int rank : {0, 1}) {
      listening_.push_back(start_listening(*system_, membership, {"", "1.2.3"}).value_or_throw());
      identity_.push_back({rank, 1, "fabric", "1.2.3", "token"});
    }
    layout_ = Layout({listening_[0].rank_address, listening_[1].rank_address});
    callers_ = std::make_unique<Callers>(*system_, identity_[1], listening_[1].all(), 1);
  }
  Deadline soon() { return system_->deadline_in(seconds(20)); }
  static bool is_in_handshake(const Dialer& dialer) {
    std::vector<os::PollItem> items;
    dialer.add_interests(items);
    return !items.empty();
  }
  void pause() { system_->make_waiter()->park(system_->deadline_in(milliseconds(1))); }
  // Advances both ends until the dial to rank 1 is over. Returns the outcome, if the dialer reports
  // one.
  std::vector<Dialer::Outcome> finish(Dialer& dialer) {
    std::vector<Dialer::Outcome> outcomes;
    for (const Deadline deadline = soon();
         dialer.is_dialing(1) && !deadline.has_passed(system_->now()); pause()) {
      for (Dialer::Outcome& outcome : dialer.advance()) outcomes.push_back(std::move(outcome));
      num_accepted_ += callers_->advance().size();
    }
    return outcomes;
  }
  // Expects that a dial with this System succeeds.
  void expect_connected(os::System& system) {
    Dialer dialer(system, {layout_, identity_[0], ""}, seconds(120), *wake_up_, null_log_sink());
    dialer.dial(1);
    const auto outcomes = finish(dialer);
    ASSERT_EQ(outcomes.size(), 1U);
    EXPECT_EQ(outcomes[0].ending, Dialer::Ending::kConnected);
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  std::vector<Listening> listening_;
  std::vector<LinkIdentity> identity_;
  Layout layout_;
  std::unique_ptr<Callers> callers_;
  const std::unique_ptr<os::Event> wake_up_ = system_->make_event();
  size_t num_accepted_ = 0;
};

// A dial is dropped during its handshake. The dialer must complete it: rank 1 may have accepted the
// connection already, and would report rank 0 as lost if the connection were closed.
TEST_F(DialerTest, ADialThatIsDroppedInItsHandshakeBecomesAConnection) {
  Dialer dialer(*system_, {layout_, identity_[0], ""}, seconds(120), *wake_up_, null_log_sink());
  dialer.dial(1);
  for (const Deadline deadline = soon(); !is_in_handshake(dialer); pause()) {
    ASSERT_FALSE(deadline.has_passed(system_->now()));
    ASSERT_TRUE(dialer.advance().empty());
  }
  dialer.drop(1);
  const auto outcomes = finish(dialer);
  ASSERT_EQ(outcomes.size(), 1U);
  EXPECT_EQ(outcomes[0].ending, Dialer::Ending::kConnected);
  EXPECT_EQ(num_accepted_, 1U);
}

TEST_F(DialerTest, ADialThatIsDroppedBeforeItsHandshakeIsNotHeardOf) {
  Dialer dialer(*system_, {layout_, identity_[0], ""}, seconds(120), *wake_up_, null_log_sink());
  dialer.dial(1);
  dialer.drop(1);
  EXPECT_TRUE(finish(dialer).empty());
  EXPECT_FALSE(dialer.is_dialing(1));
  EXPECT_EQ(num_accepted_, 0U);
}

TEST_F(DialerTest, RanksOfOneHostMeetWithoutTcp) {
  std::vector<wire::RankAddress> addresses{listening_[0].rank_address, listening_[1].rank_address};
  for (wire::RankAddress& address : addresses) address.tcp_address = "";
  layout_ = Layout(std::move(addresses));
  expect_connected(*system_);
}

TEST_F(DialerTest, AThreadThatCannotBeStartedIsTriedAgain) {
  FewThreads few(*system_);
  expect_connected(few);
  EXPECT_EQ(few.num_refused, 2);
}

// This process has no descriptor for the dial, which must be retried: if the lack of descriptors
// counted as a refusal, this rank would report the peer as lost.
TEST_F(DialerTest, ALackOfDescriptorsIsNoRefusalByThePeer) {
  FewDescriptors few(*system_);
  expect_connected(few);
  EXPECT_EQ(few.num_refused, 2);
}

TEST_F(DialerTest, ALackOfDescriptorsIsTheFailureOfTheDialingRank) {
  FewDescriptors few(*system_);
  few.num_to_refuse = 2;  // one descriptor for the unix address and one for the TCP address
  const auto socket =
      dial(few, layout_, {identity_[0], ""}, 1, wire::LinkPurpose::kControl, soon());
  ASSERT_FALSE(socket.ok());
  EXPECT_EQ(socket.error().code(), ErrorCode::kUnavailable) << socket.error().message();
  EXPECT_EQ(socket.error().details().culprit, Rank(0));
  EXPECT_TRUE(socket.error().details().is_own_limit);
}

}  // namespace
}  // namespace cadre
