// Tests foreign processes that connect to a rank while the ranks of a job connect: how many
// resources they may use, and that the ranks still connect.
#include "cadre/core/fabric/bootstrap/callers.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/silent_socket.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const LinkIdentity kIdentityOfRank0{0, 1, "world", "1.2.3", "token"};
const LinkIdentity kIdentityOfRank1{1, 1, "world", "1.2.3", "token"};

class CountedSocket final : public testing::SilentSocket {
 public:
  explicit CountedSocket(int& num_open) : num_open_(num_open) { ++num_open_; }
  ~CountedSocket() override { --num_open_; }

 private:
  int& num_open_;
};

// A listener whose queue always has a connection of a foreign process. Its accept() fails for lack
// of descriptors while `max_open` connections are open, or while `is_exhausted` is set.
class CrowdedListener final : public os::Listener {
 public:
  Result<std::unique_ptr<os::Socket>> try_accept() override {
    ++num_attempts;
    if (is_exhausted || num_open >= max_open)
      return Error(ErrorCode::kUnavailable, "accept: Too many open files");
    ++num_accepted;
    return std::unique_ptr<os::Socket>(std::make_unique<CountedSocket>(num_open));
  }
  os::Address address() const override { return {}; }

  int num_open = 0;
  int max_open = 1 << 20;
  int num_attempts = 0;
  int num_accepted = 0;
  bool is_exhausted = false;
};

void in_virtual_time(const std::function<void(os::System&)>& body) {
  sim::Simulator simulator(1, {.ranks_per_host = {1}});
  const sim::SimResult result = simulator.run([&](os::System& system, int) { body(system); });
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.ranks[0].failure, "");
}

void sleep_for(os::System& system, Duration time) {
  system.make_waiter()->park(system.deadline_in(time));
}

TEST(Callers, ACrowdCostsABoundedNumberOfConnectionsAndATurnEnds) {
  in_virtual_time([](os::System& system) {
    CrowdedListener listener;
    Callers callers(system, kIdentityOfRank0, {&listener}, 3);
    for (int turn = 0; turn < 10; ++turn) {
      EXPECT_TRUE(callers.advance().empty());
      EXPECT_LE(listener.num_open, static_cast<int>(Callers::kMaxStrangers) + 3);
    }
    EXPECT_GT(listener.num_attempts, listener.num_open);
  });
}

TEST(Callers, WhoDoesNotProveItselfInTimeIsDropped) {
  in_virtual_time([](os::System& system) {
    CrowdedListener listener;
    Callers callers(system, kIdentityOfRank0, {&listener}, 1);
    (void)callers.advance();
    EXPECT_GT(listener.num_open, 0);
    callers.stop_accepting();
    EXPECT_TRUE(callers.is_empty()) << "no caller was challenged, so none is kept";
    EXPECT_EQ(listener.num_open, 0);

    Callers others(system, kIdentityOfRank0, {&listener}, 1);
    (void)others.advance();
    const Deadline patience = system.deadline_in(seconds(60));
    EXPECT_LT(others.next_deadline(patience), patience);
    listener.is_exhausted = true;
    sleep_for(system, seconds(2));
    (void)others.advance();
    EXPECT_TRUE(others.is_empty());
    EXPECT_EQ(listener.num_open, 0);
  });
}

TEST(Callers, WithoutDescriptorsAcceptingPauses) {
  in_virtual_time([](os::System& system) {
    CrowdedListener listener;
    listener.is_exhausted = true;
    Callers callers(system, kIdentityOfRank0, {&listener}, 1);
    for (int turn = 0; turn < 10; ++turn) (void)callers.advance();
    EXPECT_EQ(listener.num_attempts, 1);
    EXPECT_NE(callers.accept_failure().find("Too many open files"), std::string::npos);
    std::vector<os::PollItem> items;
    callers.add_interests(items);
    EXPECT_TRUE(items.empty()) << "the listener would be ready again at once";
    const Deadline patience = system.deadline_in(seconds(60));
    EXPECT_LT(callers.next_deadline(patience), patience);
    listener.is_exhausted = false;
    sleep_for(system, milliseconds(200));
    (void)callers.advance();
    EXPECT_GT(listener.num_open, 0);
    EXPECT_EQ(callers.accept_failure(), "");
  });
}

// The listener must not pause, because the connection of a rank may wait in the queue behind many
// foreign connections. Some descriptors must stay free for the rest of the process.
TEST(Callers, OutOfDescriptorsStrangersMakeRoomForEachOtherWithoutAPause) {
  in_virtual_time([](os::System& system) {
    CrowdedListener listener;
    listener.max_open = 40;
    Callers callers(system, kIdentityOfRank0, {&listener}, 1);
    for (int turn = 0; turn < 20; ++turn) {
      (void)callers.advance();
      EXPECT_GT(listener.num_open, 0);
      EXPECT_LE(listener.num_open, listener.max_open - 16);
    }
    EXPECT_GE(listener.num_accepted, 100);
    EXPECT_LE(listener.num_accepted, 40 + 20 * 8);
  });
}

// accept() keeps failing for lack of descriptors although connections were closed. The process must
// pause then, and not close more and more connections.
TEST(Callers, AFailureOfAcceptThatLastsDropsSomeAndPauses) {
  in_virtual_time([](os::System& system) {
    CrowdedListener listener;
    Callers callers(system, kIdentityOfRank0, {&listener}, 1);
    (void)callers.advance();
    const int num_before = listener.num_open;
    listener.is_exhausted = true;
    for (int turn = 0; turn < 20; ++turn) (void)callers.advance();
    EXPECT_EQ(listener.num_open, num_before - 16);
  });
}

// Rank 1 of two ranks opens many silent connections before and after its own.
TEST(Callers, ARankComesThroughASilentCrowd) {
  sim::Simulator simulator(1, {.ranks_per_host = {1, 1}});
  const sim::SimResult result = simulator.run([](os::System& system, int rank) {
    const Deadline deadline = system.deadline_in(seconds(20));
    const os::Address address{os::Address::Kind::kTcp, "10.0.0.1", 4000};
    if (rank == 0) {
      const auto listener = system.listen(address).value_or_throw();
      Callers callers(system, kIdentityOfRank0, {listener.get()}, 1);
      std::vector<Handshake> done;
      while (done.empty() && !deadline.has_passed(system.now())) {
        std::vector<os::PollItem> items;
        callers.add_interests(items);
        system.poll(items, callers.next_deadline(deadline));
        done = callers.advance();
      }
      if (done.size() != 1 || done[0].hello().from != 1) throw Error(ErrorCode::kInternal, "none");
      return;
    }
    std::vector<std::unique_ptr<os::Socket>> strangers;
    const auto crowd = [&] {
      for (int i = 0; i < 100; ++i) {
        strangers.push_back(system.connect(address, deadline).value_or_throw());
      }
    };
    sleep_for(system, milliseconds(100));
    crowd();
    Handshake call = Handshake::call(system, system.connect(address, deadline).value_or_throw(),
                                     kIdentityOfRank1, 0, wire::LinkPurpose::kControl);
    call.step().value_or_throw();
    crowd();
    while (!call.is_done()) {
      os::PollItem item = call.interest();
      if (!system.poll(std::span(&item, 1), deadline)) throw Error(ErrorCode::kTimeout, "late");
      call.step().value_or_throw();
    }
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

}  // namespace
}  // namespace cadre
