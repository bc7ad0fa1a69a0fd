// Tests cases that exist only for a server over sockets: clients that are no ranks or run another
// build, limits, and descriptors that the program has closed.
#include "cadre/core/store/tcp/tcp_store_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/program_file.h"
#include "cadre/testing/core/tcp_store_fixture.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::StoreVerb;

class TcpStoreServerTest : public TcpStoreTest {};

// Returns the name of the build in the server's hello.
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

TEST_F(TcpStoreServerTest, StrangersAreDroppedWithALogLine) {
  auto server = start({.greeting_timeout = milliseconds(250)});
  const std::vector<std::string> strangers = {
      "GET / HTTP/1.1\r\n\r\n",
      "",                                        // sends no byte until it is dropped
      std::string("\xc0", 1),                    // the first byte of a hello
      hello_of_build("99.9").substr(0, 20),      // half of a hello
      std::string("\0\xce\xf7", 3),              // half of c10d's validate
      std::string("\0abcd", 5),                  // c10d's validate with a wrong magic number
      std::string("\x01\0\0\0", 4),              // c10d's set without validate
      std::string("\xc1\x20\0\0\0\0\0\0\0", 9),  // a proof without a hello
      // A hello with a build name of 16 MiB.
      std::string("\xc0\4\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0", 17),
      validation() + std::string("\xc4", 1),  // a c10d client sends a verb that only ranks may use
      validation() + validation(),            // a c10d client sends validate twice
  };
  for (const std::string& stranger : strangers) EXPECT_EQ(say(*server, stranger), "");
  const std::string log = log_.text();
  EXPECT_EQ(static_cast<size_t>(std::count(log.begin(), log.end(), '\n')), strangers.size()) << log;
  EXPECT_TRUE(connect(*server).ok());
}

// A client that does not complete the handshake must be dropped after the default greeting_timeout
// of 1 s, here in virtual time.
TEST(TcpStoreServerInTheSimulator, AStrangerIsGoneASecondAfterItCame) {
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
      ASSERT_TRUE(system.poll(std::span(&item, 1), deadline)) << "the stranger is dropped";
    }
    const Duration kept = system.now() - start;
    EXPECT_GE(kept, milliseconds(900));
    EXPECT_LE(kept, milliseconds(1500));
  });
  EXPECT_EQ(result.failure, "");
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.failure, "");
  EXPECT_NE(log.text().find("did not finish the handshake in time"), std::string::npos)
      << log.text();
}

TEST_F(TcpStoreServerTest, AThousandIdleClientsDisturbNobodyAndAllStillWork) {
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
  // Every seventh connection closes. The others must still be served.
  for (size_t i = 0; i < idle.size(); i += 7) idle[i].reset();
  for (size_t i = 0; i < idle.size(); ++i) {
    if (idle[i] == nullptr) continue;
    ASSERT_EQ(idle[i]->get("n", soon()).value(), "200") << i;
  }
}

TEST_F(TcpStoreServerTest, C10dCanBeSwitchedOff) {
  auto server = start({.serve_c10d = false});
  EXPECT_EQ(say(*server, validation()), "");
  EXPECT_NE(log_.text().find("switched off"), std::string::npos) << log_.text();
}

TEST_F(TcpStoreServerTest, GarbageAfterAGoodGreetingEndsOnlyThatConnection) {
  auto server = start();
  auto good = connect(*server).value_or_throw();
  std::string stream = validation();
  stream += wire::as_text(wire::encode({.verb = StoreVerb::kPing, .amount = 7}));
  stream.push_back('\xff');  // an unknown verb
  EXPECT_EQ(say(*server, stream), std::string("\x07\0\0\0", 4));
  EXPECT_NE(log_.text().find("unknown verb 255"), std::string::npos) << log_.text();
  EXPECT_TRUE(good->set("still", "here", soon()).ok());
}

TEST_F(TcpStoreServerTest, AnotherBuildIsRefusedAndBothAreNamed) {
  auto server = start();
  // The client receives the name of the server's build; the server's log names both builds.
  const std::string build = build_in(say(*server, hello_of_build("99.9")));
  EXPECT_NE(build, "");
  EXPECT_NE(build, "99.9");
  EXPECT_NE(log_.text().find("99.9"), std::string::npos) << log_.text();
  EXPECT_NE(log_.text().find("cadre " + build), std::string::npos) << log_.text();
}

// The server must not wait for the rest of the request, because a stranger could make it buffer a
// value of 16 MiB.
TEST_F(TcpStoreServerTest, ARequestInPlaceOfTheProofEndsTheConnection) {
  auto server = start({.greeting_timeout = seconds(600)});
  const std::string build = build_in(say(*server, hello_of_build("99.9")));
  const std::string set = "\x01";
  EXPECT_EQ(build_in(say(*server, hello_of_build(build) + set)), build);
  EXPECT_NE(log_.text().find("client sent set, but prove must come first"), std::string::npos)
      << log_.text();
}

TEST_F(TcpStoreServerTest, ListeningBeyondLoopbackNeedsAToken) {
  for (const char* host : {"0.0.0.0", "::", "10.1.2.3", "node0"}) {
    const auto server =
        TcpStoreServer::start(*system_, {.address = {os::Address::Kind::kTcp, host, 0}});
    ASSERT_FALSE(server.ok()) << host;
    EXPECT_EQ(server.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(server.error().message().find("CADRE_JOB_TOKEN"), std::string::npos);
  }
}

TEST_F(TcpStoreServerTest, AFullStoreRefusesAndStaysUsable) {
  auto server = start({.max_bytes = 1000});
  auto store = connect(*server).value_or_throw();
  ASSERT_TRUE(store->set("a", std::string(600, 'x'), soon()).ok());
  EXPECT_EQ(store->set("b", std::string(600, 'x'), soon()).error().code(),
            ErrorCode::kInvalidArgument);
  EXPECT_TRUE(store->erase("a", soon()).value());
  EXPECT_TRUE(store->set("b", std::string(600, 'x'), soon()).ok());
}

TEST_F(TcpStoreServerTest, AnAnswerOverTheLimitIsRefusedBeforeItIsBuilt) {
  auto server = start();
  auto store = connect(*server).value_or_throw();
  ASSERT_TRUE(store->set("big", std::string(kMaxStoreValueBytes, 'x'), soon()).ok());
  const auto values = store->multi_get(std::vector<std::string>(5, "big"), soon());
  ASSERT_FALSE(values.ok());
  EXPECT_EQ(values.error().code(), ErrorCode::kInvalidArgument) << values.error().message();
  EXPECT_EQ(store->get("big", soon())->size(), kMaxStoreValueBytes);
}

TEST_F(TcpStoreServerTest, ConnectionsOverTheLimitAreRefusedAndLogged) {
  auto server = start({.max_connections = 1});
  auto first = connect(*server).value_or_throw();
  EXPECT_EQ(say(*server, ""), "");
  EXPECT_NE(log_.text().find("1 connections are open"), std::string::npos) << log_.text();
  EXPECT_TRUE(first->set("k", "v", soon()).ok());
}

// Runs the function in a forked child, then ends the child and returns its exit status.
int status_of_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child ? status : -1;
}

// The will is executed when the process that left it dies. A forked child of that process must not
// retract it.
TEST_F(TcpStoreServerTest, AForkedChildDoesNotRetractTheWillOfItsParent) {
  const auto server = start();
  const auto store = connect(*server).value_or_throw();
  EXPECT_EQ(status_of_child([&] {
              const auto own = connect(*server).value_or_throw();
              auto will = own->leave_will("lost", "rank 1", soon()).value_or_throw();
              if (status_of_child([&] { will.reset(); }) != 0) ::_exit(1);
              ::_exit(0);  // the process that left the will dies without retracting it
            }),
            0);
  EXPECT_EQ(store->get("lost", soon()).value(), "rank 1");
}

// A forked child has no copy of the server's thread, but shares the server's stop event. Destroying
// the server in the child must not stop the server of the parent.
TEST_F(TcpStoreServerTest, AForkedChildDoesNotEndTheServer) {
  auto server = start();
  const auto store = connect(*server).value_or_throw();
  EXPECT_EQ(status_of_child([&] { server.reset(); }), 0);
  EXPECT_TRUE(store->set("k", "v", soon()).ok());
  // A server that finds its stop event set at every poll would keep one core busy.
  timespec before{};
  timespec after{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  system_->make_waiter()->park(system_->deadline_in(milliseconds(200)));
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const int64_t cpu_ns =
      (after.tv_sec - before.tv_sec) * 1'000'000'000 + after.tv_nsec - before.tv_nsec;
  EXPECT_LT(cpu_ns, 50'000'000);
}

// While the server process is stopped, one client ends and another one pushes an item. The server
// then finds both in its socket queues. It must not send the item to the client that has ended.
TEST_F(TcpStoreServerTest, AnItemIsNotSentToAClientThatHasEnded) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const pid_t host = ::fork();
  ASSERT_GE(host, 0);
  if (host == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto server = start();
    const uint16_t port = server->address().port;
    static_cast<void>(::write(pipe[1], &port, sizeof(port)));
    ::pause();
  }
  TcpStoreOptions options{.address = {os::Address::Kind::kTcp, "127.0.0.1", 0}, .token = "secret"};
  ASSERT_EQ(::read(pipe[0], &options.address.port, sizeof(uint16_t)), 2);
  const auto store = TcpStore::connect(*system_, options, soon()).value_or_throw();
  auto other = TcpStore::connect(*system_, options, soon()).value_or_throw();
  const auto popper = system_->spawn("popper", [&] {
    EXPECT_FALSE(other->queue_pop("q", system_->deadline_in(milliseconds(300))).ok());
    other.reset();
  });
  system_->make_waiter()->park(system_->deadline_in(milliseconds(100)));
  ::kill(host, SIGSTOP);
  int status = 0;
  ::waitpid(host, &status, WUNTRACED);  // waits until all threads have stopped
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_FALSE(store->queue_push("q", "item", system_->deadline_in(milliseconds(1))).ok());
  popper->join();
  ::kill(host, SIGCONT);
  const auto item = store->queue_pop("q", system_->deadline_in(seconds(5)));
  EXPECT_TRUE(item.ok() && *item == "item");
  ::kill(host, SIGKILL);
  ::waitpid(host, &status, 0);
  for (const int end : pipe) ::close(end);
}

TEST_F(TcpStoreServerTest, AServerEndsAlthoughTheProgramHasClosedItsDescriptors) {
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
