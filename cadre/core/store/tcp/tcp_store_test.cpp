// Tests cases that exist only for a store over sockets: servers of another build or with another
// token, lost servers, and listeners that are no store.
#include "cadre/core/store/tcp/tcp_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/tcp_store_fixture.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::StoreVerb;

TEST_F(TcpStoreTest, AC10dCounterThatIsNoNumberEndsTheConnectionAsTorchsServerDoes) {
  auto server = start();
  auto store =
      TcpStore::connect(*system_, {.address = server->address(), .protocol = StoreProtocol::kC10d},
                        soon())
          .value_or_throw();
  ASSERT_TRUE(store->set("text", "abc", soon()).ok());
  EXPECT_FALSE(store->add("text", 1, soon()).ok());
  EXPECT_EQ(store->get("text", soon()).value(), "abc");  // this call needs a new connection
}

TEST_F(TcpStoreTest, ANativeCounterThatIsNoNumberIsTheProgramsFault) {
  auto server = start();
  auto store = connect(*server).value_or_throw();
  ASSERT_TRUE(store->set("text", "abc", soon()).ok());
  const auto sum = store->add("text", 1, soon());
  ASSERT_FALSE(sum.ok());
  EXPECT_EQ(sum.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(sum.error().message().find("abc"), std::string::npos) << sum.error().message();
}

TEST_F(TcpStoreTest, AnotherTokenIsRefusedOnBothSides) {
  auto server = start();
  const auto refused = connect(*server, "wrong");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().message().find("CADRE_JOB_TOKEN"), std::string::npos);
  server->close();
  EXPECT_NE(log_.text().find("token"), std::string::npos) << log_.text();
}

// The test acts as the server and sends a hello that names another build.
TEST_F(TcpStoreTest, AServerOfAnotherBuildIsRefusedByTheClient) {
  auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  auto impostor = system_->spawn("impostor", [&] {
    os::PollItem item{.target = listener.get(), .want_read = true};
    ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
    auto socket = listener->try_accept().value_or_throw();
    const auto hello = wire::encode_answer(
        StoreVerb::kHello,
        {.number = wire::kStoreProtocol, .values = {"99.9", std::string(32, 'n')}});
    ASSERT_EQ(socket->try_send(hello).value(), hello.size());
    std::array<std::byte, 4096> buffer;
    item = {.target = socket.get(), .want_read = true};
    while (system_->poll(std::span(&item, 1), soon()) && socket->try_recv(buffer).ok()) {
    }
  });
  const auto refused =
      TcpStore::connect(*system_, {.address = listener->address(), .token = "secret"}, soon());
  impostor->join();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().message().find("99.9"), std::string::npos) << refused.error().message();
}

TEST_F(TcpStoreTest, TheServersEndIsNoticedByWaitingAndLaterCalls) {
  for (const StoreProtocol protocol : {StoreProtocol::kNative, StoreProtocol::kC10d}) {
    auto server = start();
    auto store =
        TcpStore::connect(*system_,
                          {.address = server->address(), .token = "secret", .protocol = protocol},
                          soon())
            .value_or_throw();
    // The store must answer a call while another call waits for a key that is never set.
    std::optional<Result<std::string>> waited;
    auto thread = system_->spawn("waiting", [&] { waited = store->get("never", soon()); });
    ASSERT_TRUE(store->set("here", "1", soon()).ok());
    server->close();
    thread->join();
    EXPECT_EQ(waited->error().code(), ErrorCode::kPeerLost) << waited->error().message();
    EXPECT_NE(waited->error().message().find("never"), std::string::npos);
    const auto later = store->get("here", soon());
    ASSERT_FALSE(later.ok());
    EXPECT_EQ(later.error().code(), ErrorCode::kPeerLost) << later.error().message();
  }
}

TEST_F(TcpStoreTest, ConnectWaitsForAServerThatStartsLaterAndNamesOneThatNeverDoes) {
  const os::Address address{os::Address::Kind::kUnix,
                            format("cadre-store-test-{}", system_->host().pid), 0};
  const auto never =
      TcpStore::connect(*system_, {.address = address}, system_->deadline_in(milliseconds(100)));
  ASSERT_FALSE(never.ok());
  EXPECT_EQ(never.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(never.error().message().find(address.host), std::string::npos);
  std::optional<Result<std::unique_ptr<TcpStore>>> connected;
  auto early = system_->spawn("early", [&] {
    connected = TcpStore::connect(*system_, {.address = address, .token = "secret"}, soon());
  });
  auto server = start({.address = address});
  early->join();
  EXPECT_TRUE(connected->ok()) << connected->error().message();
}

TEST_F(TcpStoreTest, ConnectSaysThatSomethingElseListensAndWhatItAnswered) {
  const auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  auto web_server = system_->spawn("web", [&] {
    os::PollItem item{.target = listener.get(), .want_read = true};
    ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
    auto socket = listener->try_accept().value_or_throw();
    const std::string_view answer = "HTTP/1.1 400 Bad Request\r\nServer: other\r\n\r\n";
    ASSERT_EQ(socket->try_send(wire::as_bytes(answer)).value(), answer.size());
    std::array<std::byte, 4096> buffer;
    item = {.target = socket.get(), .want_read = true};
    while (system_->poll(std::span(&item, 1), soon()) && socket->try_recv(buffer).ok()) {
    }
  });
  const auto refused = TcpStore::connect(*system_, {.address = listener->address()}, soon());
  web_server->join();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused.error().message(),
            format("connecting to the store at {}: the process that listens there is no Cadre "
                   "store: it answered \"HTTP/1.1 400 Bad Request\"; choose another MASTER_PORT, "
                   "the same on all ranks",
                   listener->address().to_string()));
}

TEST_F(TcpStoreTest, ConnectDoubtsAListenerThatSaysNothing) {
  // The test never accepts a connection, but the kernel completes it.
  const auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  for (const StoreProtocol protocol : {StoreProtocol::kNative, StoreProtocol::kC10d}) {
    const auto never = TcpStore::connect(*system_,
                                         {.address = listener->address(),
                                          .protocol = protocol,
                                          .greeting_timeout = milliseconds(100)},
                                         system_->deadline_in(seconds(1)));
    ASSERT_FALSE(never.ok());
    EXPECT_EQ(never.error().code(), ErrorCode::kTimeout);
    EXPECT_NE(never.error().message().find("the process that listens there accepted the connection "
                                           "and sent nothing: if it is no "),
              std::string::npos)
        << never.error().message();
  }
}

// connect() tries again after an attempt without an answer, because the silent listener may be a
// store on an overloaded host.
TEST_F(TcpStoreTest, ConnectTriesAgainWhereNothingWasSaid) {
  auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const os::Address address = listener->address();
  std::unique_ptr<os::Socket> silent;
  std::unique_ptr<TcpStoreServer> server;
  auto starter = system_->spawn("starter", [&] {
    os::PollItem item{.target = listener.get(), .want_read = true};
    ASSERT_TRUE(system_->poll(std::span(&item, 1), soon()));
    silent = listener->try_accept().value_or_throw();
    listener.reset();
    server = start({.address = address});
  });
  const auto client = TcpStore::connect(
      *system_, {.address = address, .token = "secret", .greeting_timeout = milliseconds(100)},
      soon());
  starter->join();
  EXPECT_TRUE(client.ok()) << client.error().message();
}

TEST_F(TcpStoreTest, ALongWaitForAServerIsLoggedOnceWithItsReason) {
  const std::vector<std::pair<os::Address, std::string>> cases = {
      // A name with a space does not resolve, and no name server is asked.
      {{os::Address::Kind::kTcp, "no name", 29500}, "does not resolve"},
      {{os::Address::Kind::kUnix, format("cadre-no-store-{}", system_->host().pid), 0}, "refused"}};
  for (const auto& [address, reason] : cases) {
    CollectingLog log;
    const auto never = TcpStore::connect(
        *system_, {.address = address, .warn_after = milliseconds(50), .log = &log},
        system_->deadline_in(seconds(1)));
    EXPECT_EQ(never.error().code(), ErrorCode::kTimeout);
    const std::string text = log.text();
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
    EXPECT_TRUE(text.starts_with(
        format("waiting to connect to={} for_s=0.05 reason=\"", address.to_string())))
        << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  }
}

TEST_F(TcpStoreTest, ASumThatWouldBeWrongEndsAC10dConnectionAndLeavesTheValue) {
  auto server = start();
  const auto store =
      TcpStore::connect(*system_, {.address = server->address(), .protocol = StoreProtocol::kC10d},
                        soon())
          .value_or_throw();
  for (const std::string value : {"3.7", "5x", "", "9223372036854775807"}) {
    ASSERT_TRUE(store->set("n", value, soon()).ok());
    EXPECT_EQ(store->add("n", 1, soon()).error().code(), ErrorCode::kPeerLost) << value;
    EXPECT_EQ(store->get("n", soon()).value(), value);
    EXPECT_NE(log_.text().find(value.starts_with('9') ? "would overflow by adding 1"
                                                      : format("holds \"{}\"", value)),
              std::string::npos)
        << log_.text();
  }
}

}  // namespace
}  // namespace cadre
