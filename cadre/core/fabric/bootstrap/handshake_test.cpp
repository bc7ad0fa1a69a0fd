// Tests the handshake of a connection between two ranks, message by message: the order of the
// proofs, and the errors and their texts.
#include "cadre/core/fabric/bootstrap/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/testing/core/other_user.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using wire::LinkPurpose;

LinkIdentity identity_of(int rank, const std::string& token = "token") {
  return {rank, 9, "group", "1.2.3", token};
}

class HandshakeTest : public ::testing::Test {
 protected:
  struct Pair {
    std::unique_ptr<os::Listener> listener;
    std::unique_ptr<os::Socket> caller;
    std::unique_ptr<os::Socket> accepted;
  };

  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }

  std::unique_ptr<os::Socket> accept(os::Listener& listener) {
    os::PollItem item{.target = &listener, .want_read = true};
    EXPECT_TRUE(system_->poll(std::span(&item, 1), soon()));
    return listener.try_accept().value_or_throw();
  }
  Pair connect() {
    Pair pair;
    pair.listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
    pair.caller = system_->connect(pair.listener->address(), soon()).value_or_throw();
    pair.accepted = accept(*pair.listener);
    return pair;
  }

  // Advances the handshake until it is done or fails.
  Status finish(Handshake& handshake) {
    const Deadline deadline = soon();
    while (true) {
      CADRE_RETURN_IF_ERROR(handshake.step());
      if (handshake.is_done()) return {};
      os::PollItem item = handshake.interest();
      if (!system_->poll(std::span(&item, 1), deadline)) {
        return Error(ErrorCode::kTimeout, "the handshake did not end");
      }
    }
  }
  Status finish_within(Handshake& handshake, Duration budget) {
    const Deadline deadline = system_->deadline_in(budget);
    Status status;
    while (status.ok() && !handshake.is_done() && !deadline.has_passed(system_->now())) {
      status = handshake.step();
    }
    return status;
  }

  // Returns the body of the next frame, without its length; an empty body if the stream has ended.
  std::vector<std::byte> read_frame(os::Socket& socket) {
    std::vector<std::byte> bytes;
    size_t wanted = sizeof(uint32_t);
    while (bytes.size() < wanted) {
      const size_t have = bytes.size();
      bytes.resize(wanted);
      const auto received = socket.try_recv(Bytes(bytes).subspan(have));
      if (!received.ok()) return {};
      bytes.resize(have + *received);
      if (bytes.size() == sizeof(uint32_t) && wanted == sizeof(uint32_t)) {
        wanted += wire::ByteReader(bytes).integer<uint32_t>();
      }
      os::PollItem item{.target = &socket, .want_read = true};
      if (bytes.size() < wanted && !system_->poll(std::span(&item, 1), soon())) return {};
    }
    return {bytes.begin() + sizeof(uint32_t), bytes.end()};
  }
  void send(os::Socket& socket, const wire::ControlMessage& message) {
    const auto frame = wire::encode_control(message);
    ASSERT_EQ(socket.try_send(frame).value(), frame.size());
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(HandshakeTest, BothEndsAreDoneAndNotAByteIsLeft) {
  Pair pair = connect();
  Handshake call =
      Handshake::call(*system_, std::move(pair.caller), identity_of(1), 0, LinkPurpose::kData);
  Handshake answer = Handshake::answer(*system_, std::move(pair.accepted), identity_of(0));
  Status answered;
  auto other = system_->spawn("answer", [&] { answered = finish(answer); });
  const Status called = finish(call);
  other->join();
  ASSERT_TRUE(called.ok()) << called.error().message();
  ASSERT_TRUE(answered.ok()) << answered.error().message();
  EXPECT_EQ(answer.hello().from, 1);
  EXPECT_EQ(answer.hello().purpose, LinkPurpose::kData);
  const auto caller = call.take();
  const auto accepted = answer.take();
  std::array<std::byte, 8> buffer{};
  EXPECT_EQ(caller->try_recv(buffer).value(), 0u);
  EXPECT_EQ(accepted->try_recv(buffer).value(), 0u);
}

// The accepting end must send no proof before it has checked that of the other end: a process
// without the token could test any number of guesses against the proof offline.
TEST_F(HandshakeTest, TheEndThatAcceptsShowsNothingOfTheTokenBeforeTheOtherHasProvedIt) {
  Pair pair = connect();
  Status answered;
  auto other = system_->spawn("answer", [&] {
    Handshake answer = Handshake::answer(*system_, std::move(pair.accepted), identity_of(0));
    answered = finish(answer);
  });
  send(*pair.caller,
       wire::Hello{.from = 1, .to = 0, .round = 9, .group = "group", .version = "1.2.3"});
  const auto challenge = read_frame(*pair.caller);
  send(*pair.caller, wire::Answer{});
  const auto reply = read_frame(*pair.caller);
  // The thread has closed its end, so this read does not block if no further message was sent.
  const auto rest = read_frame(*pair.caller);
  other->join();
  EXPECT_FALSE(answered.ok());
  constexpr size_t kTypeAndNonce = 1 + sizeof(wire::Nonce);
  EXPECT_EQ(challenge.size(), kTypeAndNonce);
  const auto refusal = wire::decode_control(reply);
  ASSERT_TRUE(refusal.ok());
  ASSERT_TRUE(std::holds_alternative<wire::Refusal>(*refusal));
  EXPECT_THAT(std::get<wire::Refusal>(*refusal).reason, HasSubstr("another job token"));
  EXPECT_TRUE(rest.empty());
}

TEST_F(HandshakeTest, AnotherTokenIsRefusedByBothEnds) {
  Pair pair = connect();
  Handshake call =
      Handshake::call(*system_, std::move(pair.caller), identity_of(1), 0, LinkPurpose::kControl);
  Handshake answer = Handshake::answer(*system_, std::move(pair.accepted), identity_of(0, "other"));
  Status answered;
  auto other = system_->spawn("answer", [&] { answered = finish(answer); });
  const Status called = finish(call);
  other->join();
  ASSERT_FALSE(called.ok());
  ASSERT_FALSE(answered.ok());
  EXPECT_THAT(called.error().message(), HasSubstr("another job token"));
  EXPECT_THAT(answered.error().message(), HasSubstr("another job token"));
}

// The hello message is that of an earlier build, whose handshake had no version number. It must be
// refused with an error that names the cause.
TEST_F(HandshakeTest, AnEarlierHandshakeIsRefusedByName) {
  Pair pair = connect();
  Handshake answer = Handshake::answer(*system_, std::move(pair.accepted), identity_of(0));
  wire::ByteWriter body;
  body.integer(uint8_t{0});   // hello
  body.integer(uint8_t{1});   // the purpose: collectives
  body.integer(int32_t{1});   // the rank that connects
  body.integer(int32_t{0});   // the rank that accepts
  body.integer(uint64_t{9});  // round
  body.text("group");
  body.text("1.2.3");
  body.raw(wire::Nonce{});
  wire::ByteWriter frame;
  frame.integer(static_cast<uint32_t>(body.bytes().size()));
  frame.raw(body.bytes());
  ASSERT_EQ(pair.caller->try_send(frame.bytes()).value(), frame.bytes().size());
  const Status answered = finish_within(answer, std::chrono::seconds(5));
  ASSERT_FALSE(answered.ok());
  EXPECT_THAT(answered.error().message(), HasSubstr("version of the handshake"));
  EXPECT_THAT(answered.error().message(), HasSubstr("one build of Cadre on all ranks"));
}

// The user id alone distinguishes a rank from a foreign process if there is no token. Unix sockets,
// over which memory is passed, require both the token and the user id.
TEST_F(HandshakeTest, AnotherUserIsRefusedWithoutATokenAndOnUnixSockets) {
  if (!testing::obstacle_to_other_user().empty()) {
    GTEST_SKIP() << testing::obstacle_to_other_user();
  }
  const os::Address unix_address{os::Address::Kind::kUnix,
                                 format("cadre-handshake-test-{}", system_->host().pid), 0};
  const os::Address tcp_address{os::Address::Kind::kTcp, "127.0.0.1", 0};
  for (const auto& [address, token] : {std::pair(unix_address, "token"),
                                       std::pair(unix_address, ""), std::pair(tcp_address, "")}) {
    const auto listener = system_->listen(address).value_or_throw();
    Status answered;
    auto other = system_->spawn("answer", [&, token = token] {
      Handshake answer = Handshake::answer(*system_, accept(*listener), identity_of(0, token));
      answered = finish(answer);
    });
    const auto hello = wire::encode_control(wire::Hello{.purpose = LinkPurpose::kData,
                                                        .from = 1,
                                                        .to = 0,
                                                        .round = 9,
                                                        .group = "group",
                                                        .version = "1.2.3"});
    const std::string heard =
        testing::talk_as_other_user(listener->address(), std::string(wire::as_text(hello)));
    other->join();
    ASSERT_FALSE(answered.ok());
    EXPECT_THAT(answered.error().message(), HasSubstr(format("user {}", testing::kOtherUser)));
    EXPECT_THAT(heard, HasSubstr("belongs to user"));
  }
}

}  // namespace
}  // namespace cadre
