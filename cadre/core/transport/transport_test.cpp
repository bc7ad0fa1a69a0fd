// Tests the properties that every Transport must have: order of bytes, back-pressure, full duplex,
// waiting, and how waits and streams end.
#include "cadre/core/transport/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

constexpr Duration kLongEnough = seconds(20);

// Returns the byte at a position of the stream from one rank to another.
std::byte byte_at(size_t position, int from, int to) {
  return static_cast<std::byte>((position * 31 + position / 251 + from * 7 + to * 13) & 0xff);
}

std::vector<std::byte> make_stream(size_t size, int from, int to) {
  std::vector<std::byte> stream(size);
  for (size_t i = 0; i < size; ++i) stream[i] = byte_at(i, from, to);
  return stream;
}

class TransportTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  TransportGroup make_group(int world_size) { return {*system_, GetParam(), world_size}; }
  Deadline soon() { return system_->deadline_in(kLongEnough); }

  // Fills the channel until it accepts no more bytes, and returns their number. The network may
  // drain the sender's buffer with a delay, so the channel is taken for full only if it accepts no
  // byte for a while.
  size_t fill(Transport& transport, Rank peer) {
    const std::vector<std::byte> piece(1 << 20);
    size_t total = 0;
    for (;;) {
      while (const size_t taken = transport.channel(peer).try_send(piece).value_or_throw()) {
        total += taken;
      }
      const ChannelInterest interest{.peer = peer, .want_send = true};
      const auto status =
          transport.wait(std::span(&interest, 1), system_->deadline_in(milliseconds(50)));
      if (!status.ok()) {
        EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
        return total;
      }
    }
  }

  void receive_exactly(Transport& transport, Rank peer, Bytes target) {
    while (!target.empty()) {
      const size_t received = transport.channel(peer).try_recv(target).value_or_throw();
      target = target.subspan(received);
      if (received > 0) continue;
      const ChannelInterest interest{.peer = peer, .want_recv = true};
      transport.wait(std::span(&interest, 1), soon()).value_or_throw();
    }
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

INSTANTIATE_TEST_SUITE_P(All, TransportTest,
                         ::testing::Values(TransportKind::kTcp, TransportKind::kShm),
                         [](const auto& test) { return std::string(to_string(test.param)); });

// Sends to a peer and receives from it at the same time, in pieces of random sizes, until both are
// done.
void exchange(Transport& transport, Rank peer, ConstBytes out, Bytes in, Random& random,
              Deadline deadline) {
  while (!out.empty() || !in.empty()) {
    const size_t send_at_most = 1 + random.below(200'000);
    const size_t recv_at_most = 1 + random.below(200'000);
    const size_t sent = transport.channel(peer)
                            .try_send(out.first(std::min(out.size(), send_at_most)))
                            .value_or_throw();
    const size_t received = transport.channel(peer)
                                .try_recv(in.first(std::min(in.size(), recv_at_most)))
                                .value_or_throw();
    out = out.subspan(sent);
    in = in.subspan(received);
    if (sent + received > 0) continue;
    const ChannelInterest interest{peer, !out.empty(), !in.empty()};
    if (interest.want_send || interest.want_recv) {
      transport.wait(std::span(&interest, 1), deadline).value_or_throw();
    }
  }
}

TEST_P(TransportTest, KnowsItsRankAndWorld) {
  const auto group = make_group(3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(group.of(rank).rank(), rank);
    EXPECT_EQ(group.of(rank).world_size(), 3);
  }
}

TEST_P(TransportTest, NothingToReceiveIsZeroBytes) {
  const auto group = make_group(2);
  std::array<std::byte, 8> buffer;
  EXPECT_EQ(*group.of(0).channel(1).try_recv(buffer), 0u);
  EXPECT_EQ(*group.of(0).channel(1).try_send({}), 0u);
}

TEST_P(TransportTest, BytesArriveInOrderBothWaysAtOnce) {
  constexpr uint64_t kSeed = 20261121;
  constexpr size_t kSize = 5'000'003;
  const auto group = make_group(2);
  const std::string failures = group.run([&](Transport& transport) {
    const int me = transport.rank();
    Random random(kSeed + static_cast<uint64_t>(me));
    std::vector<std::byte> received(kSize);
    exchange(transport, 1 - me, make_stream(kSize, me, 1 - me), received, random, soon());
    require(received == make_stream(kSize, 1 - me, me),
            "the received bytes differ from those that were sent");
  });
  EXPECT_EQ(failures, "") << "seed " << kSeed;
}

TEST_P(TransportTest, ManyRanksEachKeepTheirOwnOrder) {
  constexpr int kRanks = 5;
  constexpr size_t kSize = 100'000;
  const auto group = make_group(kRanks);
  const std::string failures = group.run([&](Transport& transport) {
    const int me = transport.rank();
    // The peer of this rank is round - me, so both ranks of a pair choose each other and both call
    // exchange().
    Random random(7);
    for (int round = 0; round < kRanks; ++round) {
      const int peer = (round - me + kRanks) % kRanks;
      if (peer == me) continue;
      std::vector<std::byte> received(kSize);
      exchange(transport, peer, make_stream(kSize, me, peer), received, random, soon());
      require(received == make_stream(kSize, peer, me),
              "the received bytes differ from those that were sent");
    }
  });
  EXPECT_EQ(failures, "");
}

TEST_P(TransportTest, AFullChannelTakesNothingUntilThePeerReceives) {
  const auto group = make_group(2);
  const size_t filled = fill(group.of(0), 1);
  EXPECT_GE(filled, 4096u);
  std::vector<std::byte> received(filled);
  receive_exactly(group.of(1), 0, received);
  EXPECT_EQ(*group.of(1).channel(0).try_recv(received), 0u) << "more bytes came than were sent";
  const ChannelInterest interest{.peer = 1, .want_send = true};
  EXPECT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok());
  EXPECT_GT(*group.of(0).channel(1).try_send(received), 0u);
}

TEST_P(TransportTest, WaitWakesForAnyOfSeveralPeers) {
  const auto group = make_group(3);
  const std::string failures = group.run([&](Transport& transport) {
    constexpr int kRounds = 200;
    std::array<std::byte, 1> token{};
    if (transport.rank() != 0) {  // sends the next token when rank 0 has returned the last
      for (int round = 0; round < kRounds; ++round) {
        require(*transport.channel(0).try_send(token) == 1, "the channel has no room for one byte");
        receive_exactly(transport, 0, token);
      }
      return;
    }
    std::array<int, 3> seen{};
    while (seen[1] + seen[2] < 2 * kRounds) {
      const std::array interests = {ChannelInterest{.peer = 1, .want_recv = true},
                                    ChannelInterest{.peer = 2, .want_recv = true}};
      transport.wait(interests, soon()).value_or_throw();
      size_t moved = 0;
      for (const int peer : {1, 2}) {
        if (transport.channel(peer).try_recv(token).value_or_throw() == 0) continue;
        ++moved;
        ++seen[static_cast<size_t>(peer)];
        require(*transport.channel(peer).try_send(token) == 1,
                "the channel has no room for one byte");
      }
      require(moved > 0, "wait() returned ok, but no token had arrived");
    }
  });
  EXPECT_EQ(failures, "");
}

TEST_P(TransportTest, DeadlineNamesWhatWasWaitedFor) {
  const auto group = make_group(2);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  const auto status =
      group.of(0).wait(std::span(&interest, 1), system_->deadline_in(milliseconds(10)));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
  EXPECT_THAT(status.error().message(), HasSubstr("rank 0"));
  EXPECT_THAT(status.error().message(), HasSubstr("to receive from rank 1"));
}

TEST_P(TransportTest, AStreamOfBytesDoesNotOutrunTheDeadline) {
  const auto group = make_group(2);
  const std::array<std::byte, 1> token{};
  ASSERT_EQ(*group.of(1).channel(0).try_send(token), 1u);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  ASSERT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok());
  const auto status = group.of(0).wait(std::span(&interest, 1), Deadline(system_->now()));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
}

TEST_P(TransportTest, InterruptEndsAWaitFromAnotherThread) {
  const auto group = make_group(2);
  const auto thread = system_->spawn("interrupter", [&] {
    const auto waiter = system_->make_waiter();
    waiter->park(system_->deadline_in(milliseconds(20)));
    group.interrupt_of(0).raise();
  });
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  const auto status = group.of(0).wait(std::span(&interest, 1), soon());
  thread->join();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kAborted);
  // Later waits return at once with the same error.
  EXPECT_EQ(group.of(0).wait(std::span(&interest, 1), soon()).error().code(), ErrorCode::kAborted);
}

TEST_P(TransportTest, AWakeUpEndsAWaitOnce) {
  const auto group = make_group(2);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  const auto thread = system_->spawn("waker", [&] {
    const auto waiter = system_->make_waiter();
    waiter->park(system_->deadline_in(milliseconds(20)));
    group.of(0).wake();
  });
  EXPECT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok());
  thread->join();
  const auto again =
      group.of(0).wait(std::span(&interest, 1), system_->deadline_in(milliseconds(10)));
  EXPECT_EQ(again.error().code(), ErrorCode::kTimeout);
  // A wake-up that comes before the wait must not be lost.
  group.of(0).wake();
  EXPECT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok());
}

TEST_P(TransportTest, AClosedPeerIsLostAfterItsLastByte) {
  auto group = make_group(2);
  const auto sent = make_stream(1000, 1, 0);
  ASSERT_EQ(*group.of(1).channel(0).try_send(sent), sent.size());
  group.close(1);
  std::vector<std::byte> received(sent.size());
  receive_exactly(group.of(0), 1, received);
  EXPECT_EQ(received, sent);
  const ChannelInterest interest{.peer = 1, .want_recv = true};
  ASSERT_TRUE(group.of(0).wait(std::span(&interest, 1), soon()).ok())
      << "the end of the stream counts as progress";
  const auto end = group.of(0).channel(1).try_recv(received);
  ASSERT_FALSE(end.ok());
  EXPECT_EQ(end.error().code(), ErrorCode::kPeerLost);
  EXPECT_THAT(end.error().message(), HasSubstr("rank 0, channel to rank 1"));
}

TEST_P(TransportTest, AClosedPeerEndsASend) {
  auto group = make_group(2);
  fill(group.of(0), 1);
  const auto closer = system_->spawn("closer", [&] {
    const auto waiter = system_->make_waiter();
    waiter->park(system_->deadline_in(milliseconds(20)));
    group.close(1);
  });
  const ChannelInterest interest{.peer = 1, .want_send = true};
  const auto status = group.of(0).wait(std::span(&interest, 1), soon());
  closer->join();
  ASSERT_TRUE(status.ok());
  const std::array<std::byte, 1> token{};
  const auto sent = group.of(0).channel(1).try_send(token);
  ASSERT_FALSE(sent.ok());
  EXPECT_EQ(sent.error().code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace cadre
