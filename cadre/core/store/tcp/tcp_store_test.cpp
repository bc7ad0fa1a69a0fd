// Tests failures that only a store over sockets can have: foreign connections, other builds, wrong
// tokens, lost servers, invalid bytes.
#include "cadre/testing/core/tcp_store_fixture.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/program_file.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::StoreVerb;

// Returns the build that the server's answer to a hello contains.
std::string build_in(const std::string& heard) {
  wire::Progress progress;
  const auto answer =
      wire::decode_answer({.verb = StoreVerb::kHello}, wire::as_bytes(heard), progress)
          .value_or_throw();
  return answer.message ? answer.message->values[0] : std::string();
}

std::string validation() {
  return std::string(
      wire::as_text(wire::encode({.verb = StoreVerb::kValidate, .amount = wire::kC10dMagic})));
}

TEST_F(TcpStoreTest, StrangersAreDroppedWithALogLine) {
  auto server = start({.greeting_timeout = milliseconds(250)});
  const std::vector<std::string> strangers = {
      "GET / HTTP/1.1\r\n\r\n",
      "",                                    // sends nothing until its time is over
      std::string("\xc0", 1),                // the first byte of a hello
      hello_of_build("99.9").substr(0, 20),  // the first half of a hello
      std::string("\0\xce\xf7", 3),          // half of the verb validate of c10d
      std::string("\0abcd", 5),              // the verb validate of c10d with a wrong magic number
      std::string("\x01\0\0\0", 4),          // the verb set of c10d without validate
      std::string("\xc1\x20\0\0\0\0\0\0\0", 9),                 // a proof without a hello
      std::string("\xc0\4\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0", 17),  // a hello whose build has 16 MiB
      validation() + std::string("\xc4", 1),  // a verb for ranks from a client of c10d
      validation() + validation(),            // validated twice
  };
  for (const std::string& stranger : strangers) EXPECT_EQ(say(*server, stranger), "");
  const std::string log = log_.text();
  EXPECT_EQ(static_cast<size_t>(std::count(log.begin(), log.end(), '\n')), strangers.size()) << log;
  EXPECT_TRUE(connect(*server).ok());
}

// This test uses the default limit, in virtual time.
TEST(TcpStoreInTheSimulator, AStrangerIsGoneASecondAfterItCame) {
  sim::Simulator simulator(1, {.ranks_per_host = {1, 1}});
  const os::Address address{os::Address::Kind::kTcp, "node0", 29500};
  CollectingLog log;
  const sim::SimResult result = simulator.run([&](os::System& system, int rank) {
    const Deadline deadline = system.deadline_in(seconds(20));
    if (rank == 0) {
      const auto server =
          TcpStoreServer::start(system, {.address = address, .token = "secret", .log = &log})
              .value_or_throw();
      system.make_waiter()->park(system.deadline_in(seconds(15)));
      return;
    }
    auto socket = system.connect(address, deadline);
    while (!socket.ok() && !deadline.has_passed(system.now())) {
      system.make_waiter()->park(system.deadline_in(milliseconds(1)));
      socket = system.connect(address, deadline);
    }
    const TimePoint start = system.now();
    for (ConstBytes rest = wire::as_bytes("\xc0"); !rest.empty();) {
      rest = rest.subspan((*socket)->try_send(rest).value_or_throw());
    }
    std::array<std::byte, 16> buffer{};
    while ((*socket)->try_recv(buffer).ok()) {
      os::PollItem item{.target = socket->get(), .want_read = true};
      ASSERT_TRUE(system.poll(std::span(&item, 1), deadline)) << "it was kept";
    }
    const Duration kept = system.now() - start;
    EXPECT_GE(kept, milliseconds(900));
    EXPECT_LE(kept, milliseconds(1500));
  });
  EXPECT_EQ(result.failure, "");
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.failure, "");
  EXPECT_NE(log.text().find("did not prove itself in time"), std::string::npos) << log.text();
}

TEST_F(TcpStoreTest, AThousandIdleClientsDisturbNobodyAndAllStillWork) {
  constexpr int kIdle = 1000;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < 2 * kIdle + 200) GTEST_SKIP() << "the hard limit of descriptors is too low";
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, 2 * kIdle + 200);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  auto server = start();
  std::vector<std::unique_ptr<TcpStore>> idle;
  for (int i = 0; i < kIdle; ++i) idle.push_back(connect(*server).value_or_throw());
  auto busy = connect(*server).value_or_throw();
  for (int i = 1; i <= 200; ++i) ASSERT_EQ(busy->add("n", 1, soon()).value(), i);
  // Every seventh connection is closed, and the others stay open.
  for (size_t i = 0; i < idle.size(); i += 7) idle[i].reset();
  for (size_t i = 0; i < idle.size(); ++i) {
    if (idle[i] == nullptr) continue;
    ASSERT_EQ(idle[i]->get("n", soon()).value(), "200") << i;
  }
}

TEST_F(TcpStoreTest, C10dCanBeSwitchedOff) {
  auto server = start({.serve_c10d = false});
  EXPECT_EQ(say(*server, validation()), "");
  EXPECT_NE(log_.text().find("switched off"), std::string::npos) << log_.text();
}

TEST_F(TcpStoreTest, GarbageAfterAGoodGreetingEndsOnlyThatConnection) {
  auto server = start();
  auto good = connect(*server).value_or_throw();
  std::string stream = validation();
  stream += wire::as_text(wire::encode({.verb = StoreVerb::kPing, .amount = 7}));
  stream.push_back('\xff');  // there is no such verb
  EXPECT_EQ(say(*server, stream), std::string("\x07\0\0\0", 4));
  EXPECT_NE(log_.text().find("unknown verb 255"), std::string::npos) << log_.text();
  EXPECT_TRUE(good->set("still", "here", soon()).ok());
}

TEST_F(TcpStoreTest, AC10dCounterThatIsNoNumberEndsTheConnectionAsTorchsServerDoes) {
  auto server = start();
  auto store =
      TcpStore::connect(*system_, {.address = server->address(), .protocol = StoreProtocol::kC10d},
                        soon())
          .value_or_throw();
  ASSERT_TRUE(store->set("text", "abc", soon()).ok());
  EXPECT_FALSE(store->add("text", 1, soon()).ok());
  EXPECT_EQ(store->get("text", soon()).value(), "abc");  // this call uses a new connection
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

TEST_F(TcpStoreTest, AnotherBuildIsRefusedAndBothAreNamed) {
  auto server = start();
  // The client's error can name the server's build, and the server's log names both builds.
  const std::string build = build_in(say(*server, hello_of_build("99.9")));
  EXPECT_NE(build, "");
  EXPECT_NE(build, "99.9");
  EXPECT_NE(log_.text().find("99.9"), std::string::npos) << log_.text();
  EXPECT_NE(log_.text().find("cadre " + build), std::string::npos) << log_.text();
}

// The server does not wait for the rest of the request. Otherwise a foreign process could make it
// hold a value of 16 MiB.
TEST_F(TcpStoreTest, ARequestInPlaceOfTheProofEndsTheConnection) {
  auto server = start({.greeting_timeout = seconds(600)});
  const std::string build = build_in(say(*server, hello_of_build("99.9")));
  const std::string set = "\x01";
  EXPECT_EQ(build_in(say(*server, hello_of_build(build) + set)), build);
  EXPECT_NE(log_.text().find("client sent set, but prove comes first"), std::string::npos)
      << log_.text();
}

// The test itself acts as a server of another build.
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
    // The store answers while another of its calls waits for a key that is never set.
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
            format("connecting to the store at {}: what listens there is no Cadre store: it "
                   "answered \"HTTP/1.1 400 Bad Request\"; choose another MASTER_PORT, the same on "
                   "all ranks",
                   listener->address().to_string()));
}

TEST_F(TcpStoreTest, ConnectDoubtsAListenerThatSaysNothing) {
  // No process accepts, but the kernel completes the connection.
  const auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  for (const StoreProtocol protocol : {StoreProtocol::kNative, StoreProtocol::kC10d}) {
    const auto never = TcpStore::connect(*system_,
                                         {.address = listener->address(),
                                          .protocol = protocol,
                                          .greeting_timeout = milliseconds(100)},
                                         system_->deadline_in(seconds(1)));
    ASSERT_FALSE(never.ok());
    EXPECT_EQ(never.error().code(), ErrorCode::kTimeout);
    EXPECT_NE(never.error().message().find("what listens there took the connection and said "
                                           "nothing: if it is no "),
              std::string::npos)
        << never.error().message();
  }
}

// The silent server may have been a store on a host that was overloaded.
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
      // A name with a space does not resolve, and no request goes to a name server.
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

TEST_F(TcpStoreTest, ListeningBeyondLoopbackNeedsAToken) {
  for (const char* host : {"0.0.0.0", "::", "10.1.2.3", "node0"}) {
    const auto server =
        TcpStoreServer::start(*system_, {.address = {os::Address::Kind::kTcp, host, 0}});
    ASSERT_FALSE(server.ok()) << host;
    EXPECT_EQ(server.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(server.error().message().find("CADRE_JOB_TOKEN"), std::string::npos);
  }
}

TEST_F(TcpStoreTest, AFullStoreRefusesAndStaysUsable) {
  auto server = start({.max_bytes = 1000});
  auto store = connect(*server).value_or_throw();
  ASSERT_TRUE(store->set("a", std::string(600, 'x'), soon()).ok());
  EXPECT_EQ(store->set("b", std::string(600, 'x'), soon()).error().code(),
            ErrorCode::kInvalidArgument);
  EXPECT_TRUE(store->erase("a", soon()).value());
  EXPECT_TRUE(store->set("b", std::string(600, 'x'), soon()).ok());
}

TEST_F(TcpStoreTest, AnAnswerOverTheLimitIsRefusedBeforeItIsBuilt) {
  auto server = start();
  auto store = connect(*server).value_or_throw();
  ASSERT_TRUE(store->set("big", std::string(kMaxStoreValueBytes, 'x'), soon()).ok());
  const auto values = store->multi_get(std::vector<std::string>(5, "big"), soon());
  ASSERT_FALSE(values.ok());
  EXPECT_EQ(values.error().code(), ErrorCode::kInvalidArgument) << values.error().message();
  EXPECT_EQ(store->get("big", soon())->size(), kMaxStoreValueBytes);
}

TEST_F(TcpStoreTest, ConnectionsOverTheLimitAreRefusedAndLogged) {
  auto server = start({.max_connections = 1});
  auto first = connect(*server).value_or_throw();
  EXPECT_EQ(say(*server, ""), "");
  EXPECT_NE(log_.text().find("1 connections are open"), std::string::npos) << log_.text();
  EXPECT_TRUE(first->set("k", "v", soon()).ok());
}

// The server's thread waits for an event that can no longer be signalled.
TEST_F(TcpStoreTest, AServerEndsAlthoughTheProgramHasClosedItsDescriptors) {
  const testing::TemporaryFolder folder;
  for (const bool are_taken : {false, true}) {
    const testing::ProgramFile file(folder.file("of the program"));
    const std::set<int> before = testing::open_descriptors();
    auto server = start();
    const std::set<int> numbers = testing::opened_since(before);
    ASSERT_GE(numbers.size(), 3u);
    for (const int number : numbers) {
      are_taken ? file.take_number(number) : testing::close_from_outside(number);
    }
    const TimePoint begin = system_->now();
    server->close();
    EXPECT_LT(system_->now() - begin, std::chrono::seconds(20));
    server.reset();
    EXPECT_TRUE(file.is_intact());
    if (!are_taken) continue;
    for (const int number : numbers) {
      EXPECT_TRUE(testing::ProgramFile::is_open(number));
      testing::close_from_outside(number);
    }
  }
}

}  // namespace
}  // namespace cadre
