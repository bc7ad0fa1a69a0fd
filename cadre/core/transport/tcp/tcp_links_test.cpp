// Tests several groups that share the connections of a process: that they do not block each other,
// their windows, how streams end, and that connections are opened on first use. transport_test.cpp
// tests the properties of every Transport.
#include "cadre/core/transport/tcp/tcp_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/link_frame.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/linked_process.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/tcp_transfers.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::LinkedProcess;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;
using wire::LinkFrame;

// A second group with the same two processes as a TransportGroup.
class SecondGroup {
 public:
  SecondGroup(const TransportGroup& group, uint64_t id) {
    for (int rank = 0; rank < 2; ++rank) {
      transports_[static_cast<size_t>(rank)] =
          group.links_of(rank).open({id, kCollectivePurpose}, {0, 1}, rank, interrupt_);
    }
  }
  Transport& of(int rank) { return *transports_[static_cast<size_t>(rank)]; }
  void close(int rank) { transports_[static_cast<size_t>(rank)].reset(); }

 private:
  os::Interrupt interrupt_;
  std::array<std::unique_ptr<Transport>, 2> transports_;
};

TEST_F(TcpLinksTest, AGroupThatNobodyReadsStopsNoOther) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  SecondGroup other(group, 7);
  size_t total = send_until_full(group.of(0), 1);
  const auto token = pattern(100, 1);
  for (int round = 0; round < 3; ++round) {
    send_all(other.of(0), 1, token);
    EXPECT_EQ(receive(other.of(1), 0, token.size()), token);
    send_all(other.of(1), 0, token);
    EXPECT_EQ(receive(other.of(0), 1, token.size()), token);
    // Rank 1 has read bytes of both groups while it waited for the other group. So the connection
    // can take more bytes of the first group, up to its window.
    total += send_until_full(group.of(0), 1);
  }
  EXPECT_EQ(total, LinkFrame::kWindowBytes);
  EXPECT_EQ(receive(group.of(1), 0, total).size(), total);
  EXPECT_GT(send_until_full(group.of(0), 1), 0U) << "rank 1 gave no credit for received bytes";
}

TEST_F(TcpLinksTest, BothGroupsKeepTheirOrderWithLongStreamsInSeveralThreads) {
  constexpr size_t kSize = 9 << 20;
  constexpr size_t kGroups = 3;
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  std::vector<std::unique_ptr<SecondGroup>> groups;
  for (size_t i = 0; i < kGroups; ++i)
    groups.push_back(std::make_unique<SecondGroup>(group, 10 + i));
  std::array<std::string, 2 * kGroups> failures;
  std::vector<std::unique_ptr<os::Thread>> threads;
  for (size_t i = 0; i < failures.size(); ++i) {
    threads.push_back(system_->spawn(cadre::format("t{}", i), [&, i] {
      failures[i] = testing::failure_of([&] {
        const int rank = static_cast<int>(i % 2);
        std::vector<std::byte> received(kSize);
        transfer(groups[i / 2]->of(rank), {1 - rank, pattern(kSize, i), received}, soon())
            .value_or_throw();
        require(received == pattern(kSize, i ^ 1),
                "the received bytes differ from those that were sent");
      });
    }));
  }
  for (const auto& thread : threads) thread->join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

TEST_F(TcpLinksTest, AGroupThatIsClosedInTheMiddleOfAFrameLeavesItWhole) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  const auto sent = pattern(3 << 20, 5);
  // Several groups send until the kernel accepts only a part of a frame. That frame must still be
  // completed after its group is closed.
  std::vector<std::unique_ptr<SecondGroup>> groups;
  size_t total = 0;
  while (groups.size() < 10 && (groups.empty() || total == sent.size())) {
    groups.push_back(std::make_unique<SecondGroup>(group, 7 + groups.size()));
    Channel& channel = groups.back()->of(0).channel(1);
    total = 0;
    while (const size_t taken =
               channel.try_send(ConstBytes(sent).subspan(total)).value_or_throw()) {
      total += taken;
    }
  }
  ASSERT_LT(total, sent.size()) << "the kernel took all bytes, so no frame was cut";
  SecondGroup& other = *groups.back();
  other.close(0);
  const auto token = pattern(100, 1);
  const auto receiver =
      system_->spawn("receiver", [&] { EXPECT_EQ(receive(group.of(1), 0, token.size()), token); });
  send_all(group.of(0), 1, token);
  receiver->join();
  std::vector<std::byte> received;
  std::optional<Error> end;
  while (!end) {
    std::array<std::byte, 5000> piece;
    const auto got = other.of(1).channel(0).try_recv(piece);
    if (got.ok())
      received.insert(received.end(), piece.begin(), piece.begin() + static_cast<ptrdiff_t>(*got));
    if (!got.ok()) end = got.error();
    const ChannelInterest interest{.peer = 0, .want_recv = true};
    if (got.ok() && *got == 0) {
      ASSERT_TRUE(other.of(1).wait(std::span(&interest, 1), soon()).ok());
    }
  }
  EXPECT_EQ(end->code(), ErrorCode::kPeerLost);
  EXPECT_THAT(end->message(), HasSubstr("rank 1, channel to rank 0"));
  EXPECT_THAT(end->message(), HasSubstr("from tcp:127.0.0.1:"));
  EXPECT_GE(received.size(), total);
  ASSERT_LE(received.size(), sent.size());
  EXPECT_TRUE(std::ranges::equal(received, ConstBytes(sent).first(received.size())));
}

TEST_F(TcpLinksTest, BytesForAGroupThatIsNotOpenYetAreKept) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  os::Interrupt interrupt;
  const auto early = group.links_of(0).open({9, kMessagePurpose}, {0, 1}, 0, interrupt);
  const auto bytes = pattern(300'000, 3);
  const auto sender = system_->spawn("sender", [&] { send_all(*early, 1, bytes); });
  const auto token = pattern(1, 1);
  // A thread that waits in another group receives the bytes.
  const auto reader = system_->spawn("reader", [&] { receive(group.of(1), 0, 1); });
  sender->join();
  send_all(group.of(0), 1, token);
  reader->join();
  const auto late = group.links_of(1).open({9, kMessagePurpose}, {0, 1}, 1, interrupt);
  EXPECT_EQ(receive(*late, 0, bytes.size()), bytes);
}

TEST_F(TcpLinksTest, BytesForAGroupThatWasClosedAreDroppedAndTheSenderIsTold) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  SecondGroup other(group, 7);
  other.close(1);
  const std::vector<std::byte> piece(100'000);
  const Deadline deadline = soon();
  Status status;
  while (status.ok()) {
    const auto sent = other.of(0).channel(1).try_send(piece);
    status = sent.ok() ? Status() : Status(sent.error());
    const ChannelInterest interest{.peer = 1, .want_send = true};
    if (sent.ok()) {
      ASSERT_TRUE(other.of(0).wait(std::span(&interest, 1), deadline).ok());
    }
  }
  EXPECT_EQ(status.error().code(), ErrorCode::kPeerLost);
  // The connection must still be usable for the other group.
  const auto token = pattern(1000, 1);
  send_all(group.of(0), 1, token);
  EXPECT_EQ(receive(group.of(1), 0, token.size()), token);
}

TEST_F(TcpLinksTest, AGroupThatIsIdleOwnsNoDescriptor) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  SecondGroup warm(group, 1000);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  EXPECT_FALSE(
      warm.of(0).wait(std::span(&interest, 1), system_->deadline_in(milliseconds(5))).ok());
  const auto before = testing::count_resources();
  std::vector<std::unique_ptr<SecondGroup>> groups;
  for (uint64_t id = 1; id <= 50; ++id) {
    groups.push_back(std::make_unique<SecondGroup>(group, id));
    EXPECT_FALSE(groups.back()
                     ->of(0)
                     .wait(std::span(&interest, 1), system_->deadline_in(milliseconds(1)))
                     .ok());
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

// Rank 0 has opened the connection and sent the first frame, kOpen, which has no payload.
TEST_F(TcpLinksTest, ConnectionsFramesAndBytesAreCounted) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  const auto token = pattern(100, 1);
  send_all(group.of(1), 0, token);
  EXPECT_EQ(receive(group.of(0), 1, token.size()), token);
  const LinkCounters sender = group.links_of(1).counters();
  EXPECT_EQ(sender.connections, 1u);
  EXPECT_EQ(sender.frames_sent, 1u);
  EXPECT_EQ(sender.bytes_sent, LinkFrame::kBytes + token.size());
  const LinkCounters receiver = group.links_of(0).counters();
  EXPECT_EQ(receiver.connections, 1u);
  EXPECT_EQ(receiver.frames_sent, 1u);
  EXPECT_EQ(receiver.bytes_sent, LinkFrame::kBytes);
}

TEST_F(TcpLinksTest, EachGroupHasItsOwnInterruptAndWakeUp) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  os::Interrupt interrupt;
  const auto other = group.links_of(0).open({7, kCollectivePurpose}, {0, 1}, 0, interrupt);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  std::optional<Status> ended;
  const Deadline deadline = soon();
  const auto waiter =
      system_->spawn("waiter", [&] { ended = other->wait(std::span(&interest, 1), deadline); });
  group.of(0).wake();
  EXPECT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok());
  group.interrupt_of(0).raise();
  EXPECT_EQ(group.of(0).wait(std::span(&interest, 1), soon()).error().code(), ErrorCode::kAborted);
  system_->make_waiter()->park(system_->deadline_in(milliseconds(20)));
  interrupt.raise();
  waiter->join();
  ASSERT_FALSE(ended->ok());
  EXPECT_EQ(ended->error().code(), ErrorCode::kAborted);
  EXPECT_FALSE(deadline.has_passed(system_->now()));
}

// The lower rank waits 20 ms for the higher rank to open the connection. In this test the higher
// rank never waits, so the lower rank must open it.
TEST_F(TcpLinksTest, TheLowerRankOpensAConnectionToAPeerThatDoesNotWait) {
  const os::Address any{os::Address::Kind::kTcp, "127.0.0.1", 0};
  std::vector<std::unique_ptr<LinkedProcess>> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.push_back(std::make_unique<LinkedProcess>(
        *system_, TcpLinksOptions{.rank = rank, .num_ranks = 2}, any,
        [&](int peer) { return processes[static_cast<size_t>(peer)]->address(); }));
  }
  os::Interrupt interrupt;
  const StreamId id{1, kMessagePurpose};
  const auto low = processes[0]->links().open(id, {0, 1}, 0, interrupt);
  const auto high = processes[1]->links().open(id, {0, 1}, 1, interrupt);
  const auto bytes = pattern(5000, 1);
  send_all(*low, 1, bytes);
  EXPECT_EQ(processes[0]->num_dialed(), 1);
  // A receive of the higher rank would open a second connection if it has not accepted the first
  // one yet. So the higher rank first waits with an optional interest, which opens no connection.
  const ChannelInterest welcome{.peer = 0, .want_recv = true, .is_optional = true};
  ASSERT_TRUE(high->wait(std::span(&welcome, 1), soon()).ok());
  EXPECT_EQ(receive(*high, 0, bytes.size()), bytes);
  send_all(*high, 0, bytes);
  EXPECT_EQ(receive(*low, 1, bytes.size()), bytes);
  EXPECT_EQ(processes[1]->num_dialed(), 0) << "the higher rank opened a second connection";
}

// Tests how a wait for bytes of rank 1 ends if rank 1 has left the group.
class LeftPeerTest : public TcpLinksTest {
 protected:
  Status wait_and_receive(Transport& transport, Duration patience) {
    const ChannelInterest interest{.peer = 1, .want_recv = true};
    CADRE_RETURN_IF_ERROR(transport.wait(std::span(&interest, 1), system_->deadline_in(patience)));
    std::array<std::byte, 8> bytes;
    const auto received = transport.channel(1).try_recv(bytes);
    return received.ok() ? Status() : Status(received.error());
  }
  static std::string_view code_of(const Status& status) {
    return status.ok() ? "ok" : to_string(status.error().code());
  }

  // The links of rank 0. Rank 1 accepts no connection: every attempt times out.
  const std::shared_ptr<TcpLinks> links_ = std::make_shared<TcpLinks>(
      *system_, TcpLinksOptions{.rank = 0, .num_ranks = 2},
      [](int, Deadline) { return Error(ErrorCode::kTimeout, "no process accepts"); });
  os::Interrupt interrupt_;
  const StreamId id_{1, kMessagePurpose};
  const std::unique_ptr<Transport> transport_ = links_->open(id_, {0, 1}, 0, interrupt_);
};

// If this process has no file descriptor left to connect, the peer must not be reported as lost.
// The stream can be used when a descriptor is free again.
TEST_F(LeftPeerTest, ADialWithoutADescriptorIsNotTheEndOfTheStream) {
  const auto links = std::make_shared<TcpLinks>(
      *system_, TcpLinksOptions{.rank = 1, .num_ranks = 2}, [](int, Deadline) {
        return Error(ErrorCode::kUnavailable, "no descriptor").with_details({.is_own_limit = true});
      });
  const auto transport = links->open(id_, {0, 1}, 1, interrupt_);
  // The higher rank opens the connection.
  const ChannelInterest interest{.peer = 0, .want_recv = true};
  for (int again = 0; again < 2; ++again) {
    const Deadline deadline = system_->deadline_in(std::chrono::seconds(20));
    EXPECT_EQ(code_of(transport->wait(std::span(&interest, 1), deadline)), "kUnavailable");
  }
}

TEST_F(LeftPeerTest, AStreamThatIsFirstUsedAfterItsPeerHasLeftEndsAtOnce) {
  links_->note_left(id_, 1);
  EXPECT_EQ(code_of(wait_and_receive(*transport_, std::chrono::seconds(20))), "kPeerLost");
}

TEST_F(LeftPeerTest, AStreamThatIsInUseEndsWhenItsPeerLeaves) {
  EXPECT_EQ(code_of(wait_and_receive(*transport_, milliseconds(5))), "kTimeout");
  links_->note_left(id_, 1);
  EXPECT_EQ(code_of(wait_and_receive(*transport_, std::chrono::seconds(20))), "kPeerLost");
}

TEST_F(LeftPeerTest, WhatWasSentBeforeLeavingIsReceived) {
  const TransportGroup group(*system_, TransportKind::kTcp, 2);
  const auto token = pattern(3, 1);
  send_all(group.of(1), 0, token);
  EXPECT_EQ(receive(group.of(0), 1, token.size()), token);
  SecondGroup other(group, 7);
  send_all(other.of(1), 0, token);
  other.close(1);
  group.links_of(0).note_left({7, kCollectivePurpose}, 1);
  EXPECT_EQ(receive(other.of(0), 1, token.size()), token);
  EXPECT_EQ(code_of(wait_and_receive(other.of(0), std::chrono::seconds(20))), "kPeerLost");
}

// The thread serves no other peer during an attempt to connect, so the first attempt is short. Each
// later one takes twice as long, because the host may be slow.
TEST_F(TcpLinksTest, AnAttemptToConnectTakesTwiceAsLongAsTheOneBefore) {
  std::vector<Duration> patience;
  os::Interrupt interrupt;
  const auto links = std::make_shared<TcpLinks>(
      *system_, TcpLinksOptions{.rank = 1, .num_ranks = 2}, [&](int, Deadline deadline) {
        patience.push_back(deadline.remaining(system_->now()));
        if (patience.size() == 5) interrupt.raise();
        return Error(ErrorCode::kTimeout, "no answer");
      });
  const auto transport = links->open({1, 1}, {0, 1}, 1, interrupt);
  const ChannelInterest interest{.peer = 0, .want_send = true};
  EXPECT_FALSE(transport->wait(std::span(&interest, 1), soon()).ok());
  ASSERT_EQ(patience.size(), 5U);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LE(patience[i], milliseconds(250 << std::min<size_t>(i, 3))) << i;
    EXPECT_GT(patience[i], milliseconds(125 << std::min<size_t>(i, 3))) << i;
  }
}

TEST_F(TcpLinksTest, APeerThatCannotBeReachedIsLostAndOneThatTakesLongIsTriedAgain) {
  std::atomic<int> num_dials{0};
  const auto links = std::make_shared<TcpLinks>(
      *system_, TcpLinksOptions{.rank = 2, .num_ranks = 3}, [&](int peer, Deadline) {
        num_dials.fetch_add(1);
        return Error(peer == 0 ? ErrorCode::kUnavailable : ErrorCode::kTimeout, "no answer");
      });
  os::Interrupt interrupt;
  const auto transport = links->open({1, 1}, {0, 1, 2}, 2, interrupt);
  const std::array<std::byte, 1> token{};
  EXPECT_EQ(*transport->channel(0).try_send(token), 0U);
  const ChannelInterest refused{.peer = 0, .want_send = true};
  EXPECT_TRUE(transport->wait(std::span(&refused, 1), soon()).ok())
      << "a refused connection counts as progress";
  const auto sent = transport->channel(0).try_send(token);
  ASSERT_FALSE(sent.ok());
  EXPECT_EQ(sent.error().code(), ErrorCode::kPeerLost);
  EXPECT_THAT(sent.error().message(), HasSubstr("rank 2, channel to rank 0"));
  EXPECT_EQ(num_dials.exchange(0), 1);
  // An optional interest that only receives opens no connection.
  const ChannelInterest welcome{.peer = 1, .want_recv = true, .is_optional = true};
  EXPECT_FALSE(
      transport->wait(std::span(&welcome, 1), system_->deadline_in(milliseconds(50))).ok());
  EXPECT_EQ(num_dials.load(), 0);
  const ChannelInterest slow{.peer = 1, .want_recv = true};
  const auto status = transport->wait(std::span(&slow, 1), system_->deadline_in(milliseconds(100)));
  EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
  EXPECT_GE(num_dials.exchange(0), 2);
}

}  // namespace
}  // namespace cadre
