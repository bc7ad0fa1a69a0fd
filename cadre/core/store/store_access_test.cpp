// Tests which keys of a store server two kinds of clients may use: clients of c10d's protocol,
// which cannot prove that they have the job's token, and processes of other users of the machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/other_user.h"
#include "cadre/testing/core/tcp_store_fixture.h"

namespace cadre {
namespace {

using testing::kOtherUser;
using testing::obstacle_to_other_user;
using testing::talk_as_other_user;
using wire::StoreRequest;
using wire::StoreVerb;

class StoreAccessTest : public TcpStoreTest {
 protected:
  std::unique_ptr<TcpStore> connect_by_c10d(const TcpStoreServer& server) {
    return TcpStore::connect(
               *system_, {.address = server.address(), .protocol = StoreProtocol::kC10d}, soon())
        .value_or_throw();
  }
  size_t num_log_lines() { return static_cast<size_t>(std::ranges::count(log_.text(), '\n')); }
};

// Returns the bytes that a c10d client sends: validate, the requests, and a ping. The answer to the
// ping shows that the requests were executed.
std::string c10d_stream(const std::vector<StoreRequest>& requests) {
  std::string stream;
  const auto append = [&stream](const StoreRequest& request) {
    stream += wire::as_text(wire::encode(request));
  };
  append({.verb = StoreVerb::kValidate, .amount = wire::kC10dMagic});
  for (const StoreRequest& request : requests) append(request);
  append({.verb = StoreVerb::kPing, .amount = 7});
  return stream;
}

TEST_F(StoreAccessTest, AC10dClientNeitherSeesNorChangesTheKeysOfNativeClients) {
  auto server = start();
  const auto native = connect(*server).value_or_throw();
  const auto c10d = connect_by_c10d(*server);
  // A c10d client puts a slash before each key, so `same_key` is "/cadre/..." on the server, like
  // `key`.
  const std::string key = "/cadre/1/rejoin/decision";
  const std::string same_key = "cadre/1/rejoin/decision";
  const std::vector<std::string> same_keys = {same_key};
  ASSERT_TRUE(native->set(key, "0,1", soon()).ok());
  ASSERT_TRUE(native->queue_push("/work", "item", soon()).ok());
  EXPECT_FALSE(c10d->check(same_keys, soon()).value());
  EXPECT_EQ(c10d->num_keys(soon()).value(), 0);
  EXPECT_EQ(c10d->list_keys(soon()).value(), std::vector<std::string>());
  EXPECT_FALSE(c10d->erase(same_key, soon()).value());
  EXPECT_EQ(c10d->compare_set(same_key, "", "1", soon()).value(), "1");
  EXPECT_EQ(c10d->queue_length("work", soon()).value(), 0);
  EXPECT_EQ(c10d->try_queue_pop("work", soon()).value(), std::nullopt);
  EXPECT_TRUE(c10d->append(same_key, ",2", soon()).ok());
  EXPECT_EQ(c10d->multi_get(same_keys, soon()).value(), std::vector<std::string>{"1,2"});
  EXPECT_EQ(native->get(key, soon()).value(), "0,1");
  EXPECT_EQ(native->queue_pop("/work", soon()).value(), "item");
  EXPECT_EQ(native->list_keys(soon()).value(), std::vector<std::string>{key});
}

TEST_F(StoreAccessTest, WhatAC10dClientSetsWithoutASlashReachesNoNativeClient) {
  auto server = start();
  const auto native = connect(*server).value_or_throw();
  const std::vector<std::string> trouble = {"cadre/0/world/trouble"};
  // The last byte is an unknown verb. The server executes all requests before it, and then closes
  // the connection.
  std::string stream =
      c10d_stream({{.verb = StoreVerb::kSet, .keys = trouble, .values = {"2made up"}},
                   {.verb = StoreVerb::kBarrier, .amount = 1, .keys = {"met"}}});
  stream.push_back('\xff');
  EXPECT_EQ(say(*server, stream), std::string("\0\x07\0\0\0", 5));
  EXPECT_FALSE(native->check(trouble, soon()).value());
  EXPECT_EQ(native->num_keys(soon()).value(), 0);
}

TEST_F(StoreAccessTest, AWaitOfOneProtocolIsNotEndedByTheOther) {
  auto server = start();
  const auto native = connect(*server).value_or_throw();
  const auto c10d = connect_by_c10d(*server);
  std::string got_by_native;
  std::string got_by_c10d;
  auto native_wait =
      system_->spawn("native", [&] { got_by_native = native->get("/k", soon()).value_or_throw(); });
  auto c10d_wait =
      system_->spawn("c10d", [&] { got_by_c10d = c10d->get("k", soon()).value_or_throw(); });
  EXPECT_TRUE(c10d->set("k", "of c10d", soon()).ok());
  EXPECT_TRUE(native->set("/k", "of native", soon()).ok());
  native_wait->join();
  c10d_wait->join();
  EXPECT_EQ(got_by_native, "of native");
  EXPECT_EQ(got_by_c10d, "of c10d");
}

TEST_F(StoreAccessTest, C10dClientsHaveALimitOfBytesOfTheirOwn) {
  auto server = start({.max_c10d_bytes = 1000});
  const auto native = connect(*server).value_or_throw();
  const auto c10d = connect_by_c10d(*server);
  ASSERT_TRUE(c10d->set("a", std::string(600, 'x'), soon()).ok());
  EXPECT_EQ(c10d->set("b", std::string(600, 'x'), soon()).error().code(), ErrorCode::kPeerLost);
  EXPECT_NE(log_.text().find("store is full: key \"/b\""), std::string::npos) << log_.text();
  EXPECT_TRUE(native->set("c", std::string(5000, 'x'), soon()).ok());
  EXPECT_TRUE(c10d->erase("a", soon()).value());
  EXPECT_TRUE(c10d->set("b", std::string(600, 'x'), soon()).ok());
  EXPECT_LE(TcpStoreServerOptions().max_c10d_bytes, TcpStoreServerOptions().max_bytes / 4);
}

TEST_F(StoreAccessTest, AnotherUserCannotSpeakC10dsProtocol) {
  if (!obstacle_to_other_user().empty()) GTEST_SKIP() << obstacle_to_other_user();
  auto server = start();
  for (const os::Address& address : {server->address()}) {
    EXPECT_EQ(talk_as_other_user(address, c10d_stream({{.verb = StoreVerb::kListKeys}})), "");
  }
  EXPECT_NE(log_.text().find(format("user {}", kOtherUser)), std::string::npos) << log_.text();
  EXPECT_EQ(num_log_lines(), 1u) << log_.text();
  EXPECT_EQ(connect_by_c10d(*server)->num_keys(soon()).value(), 0);
}

TEST_F(StoreAccessTest, WithoutATokenAnotherUserCannotSpeakTheNativeProtocolEither) {
  if (!obstacle_to_other_user().empty()) GTEST_SKIP() << obstacle_to_other_user();
  const os::Address unix_address{os::Address::Kind::kUnix,
                                 format("cadre-access-test-{}", system_->host().pid), 0};
  for (const os::Address& address :
       {os::Address{os::Address::Kind::kTcp, "127.0.0.1", 0},
        os::Address{os::Address::Kind::kTcp, "::1", 0}, unix_address}) {
    CollectingLog log;
    const auto server =
        TcpStoreServer::start(*system_, {.address = address, .log = &log}).value_or_throw();
    EXPECT_EQ(talk_as_other_user(server->address(), hello_of_build("99.9")), "")
        << server->address().to_string();
    EXPECT_NE(log.text().find(format("user {}", kOtherUser)), std::string::npos) << log.text();
    EXPECT_NE(log.text().find("CADRE_JOB_TOKEN"), std::string::npos) << log.text();
    EXPECT_TRUE(TcpStore::connect(*system_, {.address = server->address()}, soon()).ok());
  }
}

// If the job has a token, only the token decides whether a client is served, and not its user.
TEST_F(StoreAccessTest, WithATokenAnotherUserIsAskedForIt) {
  if (!obstacle_to_other_user().empty()) GTEST_SKIP() << obstacle_to_other_user();
  auto server = start();
  EXPECT_NE(talk_as_other_user(server->address(), hello_of_build("99.9")), "");
  EXPECT_NE(log_.text().find("cadre 99.9"), std::string::npos) << log_.text();
}

}  // namespace
}  // namespace cadre
