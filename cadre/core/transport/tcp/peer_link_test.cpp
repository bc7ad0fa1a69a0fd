// Tests TcpLinks with a peer that violates the protocol (docs/formats/link-frames.md), closes its
// end, or opens two connections.
#include "cadre/core/transport/tcp/peer_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/transport/tcp/tcp_links.h"
#include "cadre/core/wire/link_frame.h"
#include "cadre/testing/core/tcp_transfers.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using wire::LinkFrame;

// This process has a TcpLinks. Its peer is a socket that the test reads and writes.
class RawPeerTest : public TcpLinksTest {
 protected:
  RawPeerTest() {
    links_ =
        std::make_shared<TcpLinks>(*system_, TcpLinksOptions{.rank = 0, .num_ranks = 3},
                                   [](int, Deadline) { return Error(ErrorCode::kTimeout, ""); });
    listener_ = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
    transport_ = links_->open(kStream, {0, 1, 2}, 0, interrupt_);
    idle_ = links_->open({99, kMessagePurpose}, {0, 1, 2}, 0, interrupt_);
  }
  std::unique_ptr<os::Socket> connect(int peer) {
    auto socket = system_->connect(listener_->address(), soon()).value_or_throw();
    std::unique_ptr<os::Socket> accepted;
    while (accepted == nullptr) accepted = listener_->try_accept().value_or_throw();
    links_->add(peer, std::move(accepted));
    return socket;
  }
  void put(os::Socket& socket, ConstBytes bytes) {
    while (!bytes.empty()) {
      bytes = bytes.subspan(socket.try_send(bytes).value_or_throw());
      if (!bytes.empty()) receive_nothing();
    }
  }
  void put(os::Socket& socket, const LinkFrame& frame) { put(socket, frame.encode()); }
  // Waits for 2 ms in another group. During the wait, bytes that arrive for any stream are read.
  void receive_nothing() {
    const ChannelInterest interest{.peer = 1, .want_recv = true};
    static_cast<void>(idle_->wait(std::span(&interest, 1), system_->deadline_in(milliseconds(2))));
  }
  std::optional<Error> error_of(Rank peer) {
    const ChannelInterest interest{.peer = peer, .want_recv = true};
    transport_->wait(std::span(&interest, 1), soon()).value_or_throw();
    std::array<std::byte, 100> bytes;
    const auto received = transport_->channel(peer).try_recv(bytes);
    return received.ok() ? std::nullopt : std::optional(received.error());
  }
  // Returns the next frame that the TcpLinks has sent. The frame must have no payload.
  LinkFrame next_frame(os::Socket& socket) {
    std::array<std::byte, LinkFrame::kBytes> got;
    os::PollItem item{.target = &socket, .want_read = true};
    if (!system_->poll(std::span(&item, 1), soon())) throw Error(ErrorCode::kTimeout, "no frame");
    EXPECT_EQ(socket.try_recv(got).value_or_throw(), got.size());
    return LinkFrame::parse(got).value_or_throw();
  }
  static LinkFrame of_stream(LinkFrame::Kind kind) {
    return {kind, kStream.purpose, 0, kStream.group};
  }
  static LinkFrame data(uint32_t length) {
    return {LinkFrame::Kind::kData, kStream.purpose, length, kStream.group};
  }

  static constexpr StreamId kStream{5, kCollectivePurpose};
  os::Interrupt interrupt_;
  std::shared_ptr<TcpLinks> links_;
  std::unique_ptr<os::Listener> listener_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Transport> idle_;
};

TEST_F(RawPeerTest, AWindowIsAllThatIsKeptOfAStream) {
  const auto peer = connect(1);
  put(*peer, LinkFrame{});
  const std::vector<std::byte> payload(LinkFrame::kMaxPayloadBytes);
  for (size_t sent = 0; sent < LinkFrame::kWindowBytes; sent += payload.size()) {
    put(*peer, data(static_cast<uint32_t>(payload.size())));
    put(*peer, payload);
  }
  for (int i = 0; i < 20; ++i) receive_nothing();
  put(*peer, data(1));
  for (int i = 0; i < 20; ++i) receive_nothing();
  EXPECT_EQ(receive(*transport_, 1, LinkFrame::kWindowBytes).size(), LinkFrame::kWindowBytes);
  const auto error = error_of(1);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kCorruption);
  EXPECT_THAT(error->message(), HasSubstr("beyond its window"));
  EXPECT_THAT(error->message(), HasSubstr("rank 0, channel to rank 1"));
}

TEST_F(RawPeerTest, MalformedFramesAndFalseCreditEndTheConnection) {
  struct Case {
    std::array<std::byte, LinkFrame::kBytes> bytes;
    std::string text;
  };
  const std::vector<Case> cases = {
      {{}, "the magic"},
      {LinkFrame{LinkFrame::Kind::kCredit, kStream.purpose, 1, kStream.group}.encode(),
       "not sent"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const int rank = static_cast<int>(i) + 1;
    const auto peer = connect(rank);
    put(*peer, cases[i].bytes);
    const auto error = error_of(rank);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kCorruption);
    EXPECT_THAT(error->message(), HasSubstr(cases[i].text));
    os::PollItem item{.target = peer.get(), .want_read = true};
    ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
    std::array<std::byte, 8> rest;
    EXPECT_FALSE(peer->try_recv(rest).ok()) << "the peer sees the end of the connection";
  }
}

TEST_F(RawPeerTest, AConnectionThatEndsBeforeItsFirstFrameWasNeverMade) {
  connect(1).reset();
  receive_nothing();
  const auto peer = connect(1);
  put(*peer, LinkFrame{});
  put(*peer, data(3));
  put(*peer, pattern(3, 1));
  EXPECT_EQ(receive(*transport_, 1, 3), pattern(3, 1));
}

TEST_F(RawPeerTest, DataForAStreamThatWasClosedBeforeAreAnsweredWithAClose) {
  transport_.reset();
  const auto peer = connect(1);
  put(*peer, data(3));
  put(*peer, pattern(3, 1));
  receive_nothing();
  EXPECT_EQ(next_frame(*peer), of_stream(LinkFrame::Kind::kClose));
}

TEST_F(RawPeerTest, AProbeIsAnsweredWithACloseIfTheStreamWasClosed) {
  const auto peer = connect(1);
  static_cast<void>(transport_->channel(1));
  put(*peer, of_stream(LinkFrame::Kind::kProbe));
  receive_nothing();
  transport_.reset();
  EXPECT_EQ(next_frame(*peer), of_stream(LinkFrame::Kind::kClose))
      << "the close that the end of the transport sends";
  put(*peer, of_stream(LinkFrame::Kind::kProbe));
  receive_nothing();
  EXPECT_EQ(next_frame(*peer), of_stream(LinkFrame::Kind::kClose))
      << "the close that answers the probe";
}

// Rank 1 has left the group when there was no connection, so it has sent no close frame. This
// process must request one with a probe frame and receive all bytes before the close.
TEST_F(RawPeerTest, APeerThatHasLeftIsAskedForItsClose) {
  const auto peer = connect(1);
  put(*peer, LinkFrame{});
  static_cast<void>(transport_->channel(1));
  receive_nothing();
  links_->note_left(kStream, 1);
  EXPECT_EQ(next_frame(*peer), of_stream(LinkFrame::Kind::kProbe));
  put(*peer, data(3));
  put(*peer, pattern(3, 1));
  put(*peer, of_stream(LinkFrame::Kind::kClose));
  EXPECT_EQ(receive(*transport_, 1, 3), pattern(3, 1))
      << "bytes that the peer sent before its close";
  EXPECT_EQ(error_of(1)->code(), ErrorCode::kPeerLost);
}

TEST_F(RawPeerTest, APeerThatHasLeftIsAskedAsSoonAsItsConnectionCanBeUsed) {
  auto given_up = connect(1);
  static_cast<void>(transport_->channel(1));
  links_->note_left(kStream, 1);
  const auto peer = connect(1);
  given_up.reset();
  put(*peer, LinkFrame{});
  receive_nothing();
  EXPECT_EQ(next_frame(*peer), of_stream(LinkFrame::Kind::kProbe));
}

TEST_F(RawPeerTest, AStreamEndsIfTheOnlyConnectionToAPeerThatHasLeftWasGivenUp) {
  auto given_up = connect(1);
  static_cast<void>(transport_->channel(1));
  links_->note_left(kStream, 1);
  given_up.reset();
  EXPECT_EQ(error_of(1)->code(), ErrorCode::kPeerLost);
}

TEST_F(RawPeerTest, NothingIsSentBeforeTheFirstFrameHasCome) {
  const auto peer = connect(1);
  const auto token = pattern(3, 1);
  EXPECT_EQ(*transport_->channel(1).try_send(token), 0U);
  put(*peer, LinkFrame{});
  send_all(*transport_, 1, token);
  std::array<std::byte, LinkFrame::kBytes + 3> got;
  os::PollItem item{.target = peer.get(), .want_read = true};
  ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
  ASSERT_EQ(*peer->try_recv(got), got.size());
  EXPECT_EQ(*LinkFrame::parse(ConstBytes(got).first(LinkFrame::kBytes)), data(3));
}

TEST_F(RawPeerTest, AnEndIsOfOnePeerAndOfAllItsStreams) {
  auto lost = connect(1);
  const auto living = connect(2);
  os::Interrupt interrupt;
  const auto other = links_->open({6, kMessagePurpose}, {2, 1, 0}, 2, interrupt);
  put(*lost, data(3));
  put(*lost, pattern(3, 1));
  put(*lost, LinkFrame{LinkFrame::Kind::kData, kMessagePurpose, 50, 6});
  put(*lost, pattern(10, 2));  // the rest of the frame never arrives
  put(*living, LinkFrame{});
  lost.reset();
  EXPECT_EQ(receive(*transport_, 1, 3), pattern(3, 1));
  EXPECT_EQ(receive(*other, 1, 10), pattern(10, 2));
  const auto error = error_of(1);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
  EXPECT_THAT(error->message(), HasSubstr("rank 0, channel to rank 1"));
  EXPECT_THAT(error->message(), HasSubstr("from tcp:127.0.0.1:"));
  std::array<std::byte, 10> bytes;
  const auto of_other = other->channel(1).try_recv(bytes);
  ASSERT_FALSE(of_other.ok());
  EXPECT_EQ(of_other.error().code(), ErrorCode::kPeerLost);
  EXPECT_THAT(of_other.error().message(), HasSubstr("rank 2, channel to rank 1"));
  EXPECT_FALSE(transport_->channel(1).try_send(bytes).ok());
  send_all(*transport_, 2, bytes);
}

// The peer opens a connection while this process gets "connection refused" for its own attempt. The
// accepted connection must stay usable.
TEST_F(RawPeerTest, ARefusedAttemptDoesNotEndAConnectionThatThePeerHasOpened) {
  std::unique_ptr<os::Socket> peer;
  links_ = std::make_shared<TcpLinks>(*system_, TcpLinksOptions{.rank = 2, .num_ranks = 3},
                                      [&](int, Deadline) {
                                        peer = connect(1);
                                        put(*peer, LinkFrame{});
                                        return Error(ErrorCode::kUnavailable, "refused");
                                      });
  transport_ = links_->open(kStream, {0, 1, 2}, 2, interrupt_);
  const auto token = pattern(3, 1);
  send_all(*transport_, 1, token);
  EXPECT_EQ(next_frame(*peer), LinkFrame(data(3)));
}

// The peer receives all bytes that it needs, and closes the stream before this process calls
// try_send() again. That call must report the bytes as sent and not fail.
TEST_F(RawPeerTest, BytesThatHadLeftBeforeThePeerClosedAreSent) {
  const auto peer = connect(1);
  put(*peer, LinkFrame{});
  receive_nothing();
  const auto bytes = pattern(LinkFrame::kWindowBytes, 1);
  // Transports are added, which send until the kernel accepts no more bytes.
  std::vector<std::unique_ptr<Transport>> transports;
  size_t num_sent = 0;
  const auto send_rest = [&] {
    return transports.back()->channel(1).try_send(ConstBytes(bytes).subspan(num_sent));
  };
  for (uint64_t group = 6; num_sent % bytes.size() == 0; ++group) {
    transports.push_back(links_->open({group, kMessagePurpose}, {0, 1, 2}, 0, interrupt_));
    num_sent = 0;
    for (size_t moved = 1; moved > 0; num_sent += moved) moved = send_rest().value_or_throw();
  }
  // The waits in receive_nothing() send the rest of the partly sent frame without another
  // try_send().
  const size_t num_framed =
      (num_sent / LinkFrame::kMaxPayloadBytes + 1) * LinkFrame::kMaxPayloadBytes;
  const size_t num_payload = (transports.size() - 1) * bytes.size() + num_framed;
  size_t num_left = num_payload + num_payload / LinkFrame::kMaxPayloadBytes * LinkFrame::kBytes;
  std::vector<std::byte> sink(num_left);
  for (const Deadline deadline = soon(); num_left > 0; receive_nothing()) {
    ASSERT_FALSE(deadline.has_passed(system_->now()));
    num_left -= peer->try_recv(Bytes(sink).first(num_left)).value_or_throw();
  }
  put(*peer, {LinkFrame::Kind::kClose, kMessagePurpose, 0, 5 + transports.size()});
  for (int i = 0; i < 20; ++i) receive_nothing();
  EXPECT_EQ(send_rest().value_or_throw(), num_framed - num_sent);
  EXPECT_EQ(send_rest().error().code(), ErrorCode::kPeerLost);
}

// There are two connections. The one over which this process sends has ended. Bytes that arrive
// over the other one, over which the peer sends, must still be received.
TEST_F(RawPeerTest, TheEndOfOneOfTwoConnectionsLosesNothingOfTheOther) {
  auto first = connect(1);
  put(*first, LinkFrame{});
  receive_nothing();
  auto second = connect(1);
  const auto bytes = pattern(10'000, 4);
  put(*second, data(10'000));
  first.reset();
  receive_nothing();
  std::array<std::byte, 8> nothing;
  EXPECT_EQ(transport_->channel(1).try_recv(nothing).value_or_throw(), 0U);
  put(*second, bytes);
  EXPECT_EQ(receive(*transport_, 1, bytes.size()), bytes);
  EXPECT_FALSE(transport_->channel(1).try_send(bytes).ok());
  second.reset();
  EXPECT_EQ(error_of(1)->code(), ErrorCode::kPeerLost);
}

// A connection ends before its first frame. Either the peer gave it up, or it was cut and bytes of
// the peer were lost. This process must open a new connection; if the peer closes that one, too,
// the stream must fail.
TEST_F(RawPeerTest, ThePeerIsAskedWhetherItHasLostAConnection) {
  int num_dialed = 0;
  links_ = std::make_shared<TcpLinks>(
      *system_, TcpLinksOptions{.rank = 0, .num_ranks = 3},
      [&](int, Deadline deadline) -> Result<std::unique_ptr<os::Socket>> {
        ++num_dialed;
        auto dialed = system_->connect(listener_->address(), deadline);
        std::unique_ptr<os::Socket> other_end;  // the peer accepts this connection and closes it
        while (other_end == nullptr) other_end = listener_->try_accept().value_or_throw();
        return dialed;
      });
  transport_ = links_->open(kStream, {0, 1, 2}, 0, interrupt_);
  idle_ = links_->open({99, kMessagePurpose}, {0, 1, 2}, 0, interrupt_);
  connect(1).reset();
  receive_nothing();
  const auto error = error_of(1);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(num_dialed, 1);
}

// No thread of this process waits for rank 1, so none has noticed that the first connection has
// ended. The second connection of rank 1 makes this process check the first one.
TEST_F(RawPeerTest, OneMoreConnectionOfAPeerShowsTheEndOfTheOneBefore) {
  auto lost = connect(1);
  put(*lost, LinkFrame{});
  receive_nothing();
  const auto bytes = pattern(3, 1);
  send_all(*transport_, 1, bytes);
  lost.reset();
  const auto asking = connect(1);
  os::PollItem item{.target = asking.get(), .want_read = true};
  ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
  std::array<std::byte, 8> rest;
  EXPECT_FALSE(asking->try_recv(rest).ok())
      << "this process closes the second connection, which tells the peer";
  EXPECT_EQ(error_of(1)->code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace cadre
