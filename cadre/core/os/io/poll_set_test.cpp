// Compares PollSet with what System::poll reports of each object.
#include "cadre/core/os/io/poll_set.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

namespace cadre::os {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class PollSetTest : public ::testing::Test {
 protected:
  struct Pair {
    std::unique_ptr<Socket> here;
    std::unique_ptr<Socket> there;
  };

  Deadline soon() { return system_->deadline_in(seconds(10)); }
  Deadline at_once() { return system_->deadline_in(milliseconds(0)); }
  Pair connect() {
    if (!listener_) {
      listener_ = system_->listen({Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
    }
    Pair pair;
    pair.there = system_->connect(listener_->address(), soon()).value_or_throw();
    while (!pair.here) pair.here = listener_->try_accept().value_or_throw();
    return pair;
  }
  static void say(Socket& socket) {
    const std::byte byte{1};
    ASSERT_EQ(socket.try_send(ConstBytes(&byte, 1)).value(), 1u);
  }

  std::unique_ptr<System> system_ = make_native_system();
  std::unique_ptr<Listener> listener_;
  PollSet set_{*system_};
};

TEST_F(PollSetTest, TellsWhoIsReadyByItsKeyAndNobodyElse) {
  std::vector<Pair> pairs;
  for (uint64_t i = 0; i < 20; ++i) {
    pairs.push_back(connect());
    set_.watch(100 + i, {.target = pairs.back().here.get(), .want_read = true});
  }
  EXPECT_TRUE(set_.wait(at_once()).empty());
  say(*pairs[7].there);
  const auto ready = set_.wait(soon());
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].key, 107u);
  EXPECT_TRUE(ready[0].can_read);
  EXPECT_FALSE(ready[0].can_write);
  // Bytes that are left unread are reported again.
  EXPECT_EQ(set_.wait(soon()).size(), 1u);
}

TEST_F(PollSetTest, WhatIsWantedMayChangeAndOneThatWantsNothingIsPassedOver) {
  Pair pair = connect();
  say(*pair.there);
  set_.watch(1, {.target = pair.here.get(), .want_write = true});
  auto ready = set_.wait(soon());
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_TRUE(ready[0].can_write);
  EXPECT_FALSE(ready[0].can_read);
  set_.watch(1, {.target = pair.here.get()});
  pair.there.reset();  // not even the end of the stream is reported now
  EXPECT_TRUE(set_.wait(system_->deadline_in(milliseconds(20))).empty());
  set_.watch(1, {.target = pair.here.get(), .want_read = true});
  ready = set_.wait(soon());
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_TRUE(ready[0].can_read);
}

TEST_F(PollSetTest, WhoIsForgottenIsNotTold) {
  Pair pair = connect();
  set_.watch(1, {.target = pair.here.get(), .want_read = true});
  say(*pair.there);
  set_.forget(1);
  set_.forget(2);  // an unknown key has no effect
  EXPECT_TRUE(set_.wait(system_->deadline_in(milliseconds(20))).empty());
}

TEST_F(PollSetTest, AnEventWakesItFromAnotherThread) {
  const auto event = system_->make_event();
  set_.watch(9, {.target = event.get(), .want_read = true});
  auto thread = system_->spawn("notifier", [&] { event->notify(); });
  const auto ready = set_.wait(soon());
  thread->join();
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].key, 9u);
}

}  // namespace
}  // namespace cadre::os
