// Tests which requests a session of the store server answers and which it rejects. The byte streams
// are buffers in memory.
#include "cadre/core/store/tcp/session.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/store/tcp/greeting.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

wire::Nonce nonce_of(char fill) {
  wire::Nonce nonce;
  nonce.fill(static_cast<std::byte>(fill));
  return nonce;
}

// The client's side of one session.
class Client {
 public:
  explicit Client(Session& session) : session_(session) {}

  Status send(const StoreRequest& request) {
    in_.append(wire::encode(request));
    const auto step = session_.step(in_, out_);
    return step.ok() ? Status() : Status(step.error());
  }
  // Decodes the session's answer to a request of a rank; nullopt if there is none yet.
  std::optional<StoreResponse> answer_to(const StoreRequest& request) {
    wire::Progress progress;
    const auto decoded = wire::decode_answer(request, out_.view(), progress).value_or_throw();
    if (decoded.message) out_.consume(decoded.num_bytes);
    return decoded.message;
  }
  wire::StreamBuffer& out() { return out_; }

 private:
  Session& session_;
  wire::StreamBuffer in_;
  wire::StreamBuffer out_;
};

StoreRequest proof_of(std::string_view token, const wire::Nonce& server,
                      const wire::Nonce& client) {
  const auto proof = wire::prove_token(token, kClientProver, server, client).value_or_throw();
  return {.verb = StoreVerb::kProve, .values = {std::string(wire::as_text(proof))}};
}

class SessionTest : public ::testing::Test {
 protected:
  void greet(Client& client, std::string_view token) {
    const StoreRequest hello = hello_of_client(nonce_of('c'));
    ASSERT_TRUE(client.send(hello).ok());
    ASSERT_TRUE(client.answer_to(hello).has_value());
    ASSERT_TRUE(client.send(proof_of(token, nonce_of('s'), nonce_of('c'))).ok());
    ASSERT_TRUE(client.answer_to({.verb = StoreVerb::kProve}).has_value());
  }

  KeyTable table_;
  const os::Secret token_{"secret"};
};

TEST_F(SessionTest, ARankIsServedAfterItHasProvedTheToken) {
  Session session(table_, TicketSource(1), token_, nonce_of('s'));
  Client client(session);
  const StoreRequest hello = hello_of_client(nonce_of('c'));
  EXPECT_FALSE(session.has_greeted());
  ASSERT_TRUE(client.send(hello).ok());
  EXPECT_TRUE(session.has_greeted());
  EXPECT_FALSE(session.is_accepted());
  ASSERT_TRUE(client.answer_to(hello).has_value());
  ASSERT_TRUE(client.send(proof_of("secret", nonce_of('s'), nonce_of('c'))).ok());
  EXPECT_TRUE(session.is_accepted());
  // The server must prove that it has the token, too.
  const auto proof = client.answer_to({.verb = StoreVerb::kProve});
  ASSERT_TRUE(proof.has_value());
  const auto expected =
      wire::prove_token("secret", kServerProver, nonce_of('c'), nonce_of('s')).value_or_throw();
  EXPECT_EQ(proof->values, std::vector{std::string(wire::as_text(expected))});
}

TEST_F(SessionTest, AnotherTokenIsRefusedAndSaid) {
  Session session(table_, TicketSource(1), token_, nonce_of('s'));
  Client client(session);
  const StoreRequest hello = hello_of_client(nonce_of('c'));
  ASSERT_TRUE(client.send(hello).ok());
  ASSERT_TRUE(client.answer_to(hello).has_value());
  const Status refused = client.send(proof_of("guess", nonce_of('s'), nonce_of('c')));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(session.is_accepted());
  const auto answer = client.answer_to({.verb = StoreVerb::kProve});
  ASSERT_TRUE(answer.has_value());
  EXPECT_TRUE(answer->error.has_value());
}

TEST_F(SessionTest, AGetIsAnsweredWhenItsKeyIsThere) {
  Session session(table_, TicketSource(3), token_, nonce_of('s'));
  Client client(session);
  greet(client, "secret");
  const StoreRequest get{.verb = StoreVerb::kGet, .keys = {"k"}};
  ASSERT_TRUE(client.send(get).ok());
  EXPECT_EQ(client.answer_to(get), std::nullopt);
  ASSERT_TRUE(table_.set("k", "v").ok());
  const std::vector<KeyTable::Ticket> ready = table_.take_ready();
  ASSERT_EQ(ready.size(), 1U);
  EXPECT_EQ(TicketSource::connection_of(ready[0]), 3U);
  session.on_ready(ready[0], client.out());
  const auto answer = client.answer_to(get);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->values, std::vector<std::string>{"v"});
}

TEST_F(SessionTest, AWillIsCarriedOutAtTheEndUnlessItWasRetracted) {
  const StoreRequest will{.verb = StoreVerb::kLeaveWill, .keys = {"lost"}, .values = {"1 "}};
  {
    Session session(table_, TicketSource(1), token_, nonce_of('s'));
    Client client(session);
    greet(client, "secret");
    ASSERT_TRUE(client.send(will).ok());
    EXPECT_EQ(table_.find("lost"), nullptr);
  }
  ASSERT_NE(table_.find("lost"), nullptr);
  EXPECT_EQ(*table_.find("lost"), "1 ");
  {
    Session session(table_, TicketSource(2), token_, nonce_of('s'));
    Client client(session);
    greet(client, "secret");
    ASSERT_TRUE(client.send(will).ok());
    ASSERT_TRUE(client.send({.verb = StoreVerb::kRetractWill}).ok());
  }
  EXPECT_EQ(*table_.find("lost"), "1 ");
}

TEST_F(SessionTest, AC10dClientMayNotUseVerbsOfRanks) {
  Session session(table_, TicketSource(1));
  Client client(session);
  ASSERT_TRUE(client.send({.verb = StoreVerb::kValidate, .amount = wire::kC10dMagic}).ok());
  EXPECT_TRUE(session.is_accepted());
  ASSERT_TRUE(client.send({.verb = StoreVerb::kSet, .keys = {"k"}, .values = {"v"}}).ok());
  ASSERT_NE(table_.find("k"), nullptr);
  const Status refused =
      client.send({.verb = StoreVerb::kLeaveWill, .keys = {"k"}, .values = {"v"}});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
}

TEST_F(SessionTest, AnotherMagicAndASecondValidateAreCorruption) {
  Session strange(table_, TicketSource(1));
  EXPECT_EQ(Client(strange).send({.verb = StoreVerb::kValidate, .amount = 7}).error().code(),
            ErrorCode::kCorruption);
  Session session(table_, TicketSource(2));
  Client client(session);
  const StoreRequest validate{.verb = StoreVerb::kValidate, .amount = wire::kC10dMagic};
  ASSERT_TRUE(client.send(validate).ok());
  EXPECT_EQ(client.send(validate).error().code(), ErrorCode::kCorruption);
}

}  // namespace
}  // namespace cadre::store
