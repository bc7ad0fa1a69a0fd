// Tests "strangers": connections to a store server that have not proved that they have the token. A
// rank of the job must be able to connect however many strangers there are and however few
// descriptors the server has.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/store/tcp/greeting.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/tcp_store_fixture.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

// The tests take less time than this, so no connection is closed for its age.
constexpr Duration kNeverLate = seconds(600);
constexpr int kNumStrangers = 100;

// A signal from one process to another through a pipe.
class Whistle {
 public:
  Whistle() {
    std::array<int, 2> ends{};
    require(::pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2");
    reader_ = os::Fd(ends[0]);
    writer_ = os::Fd(ends[1]);
  }
  void blow() const { require(::write(writer_.get(), "x", 1) == 1, "write"); }
  void await() const {
    char nothing = 0;
    require(::read(reader_.get(), &nothing, 1) == 1, "read");
  }

 private:
  os::Fd reader_;
  os::Fd writer_;
};

void serve_with_few_descriptors(testing::RankContext& context, const Whistle& is_over) {
  const rlimit few{.rlim_cur = 40, .rlim_max = 40};
  require(::setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
  const auto server = TcpStoreServer::start(context.system, {.address = context.rendezvous_address,
                                                             .token = "secret",
                                                             .greeting_timeout = kNeverLate})
                          .value_or_throw();
  is_over.await();
}

TEST(Strangers, OutOfDescriptorsTheServerDropsThemAndNotItsRanks) {
  const Whistle has_strangers;
  const Whistle is_over;
  const Whistle may_go;
  const auto result = testing::run_ranks_as_processes(3, [&](testing::RankContext& context) {
    os::System& system = context.system;
    if (context.rank == 0) return serve_with_few_descriptors(context, is_over);
    const Deadline limit = system.deadline_in(seconds(8));
    const TcpStoreOptions options{.address = context.rendezvous_address, .token = "secret"};
    if (context.rank == 1) {
      const auto first = TcpStore::connect(system, options, limit).value_or_throw();
      std::vector<std::unique_ptr<os::Socket>> strangers;
      for (int i = 0; i < kNumStrangers; ++i) {
        auto socket = system.connect(options.address, limit);
        if (socket.ok()) strangers.push_back(std::move(socket).value());
      }
      has_strangers.blow();
      may_go.await();
      require(first->set("n", "1", limit).ok(), "a client that has proved the token is kept");
      is_over.blow();
      return;
    }
    has_strangers.await();
    std::vector<std::unique_ptr<TcpStore>> stores;
    for (int i = 0; i < 5; ++i) {
      auto store = TcpStore::connect(system, options, limit);
      if (store.ok()) stores.push_back(std::move(store).value());
    }
    may_go.blow();
    require(stores.size() == 5, "all five ranks have connected");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

class StrangersTest : public TcpStoreTest {};

TEST_F(StrangersTest, OverTheirLimitTheOldestIsDropped) {
  const auto server = start({.max_strangers = 3, .greeting_timeout = kNeverLate});
  std::vector<std::unique_ptr<os::Socket>> strangers;
  for (int i = 0; i < 5; ++i) {
    strangers.push_back(system_->connect(server->address(), soon()).value_or_throw());
  }
  const auto store = connect(*server).value_or_throw();
  EXPECT_TRUE(store->set("k", "v", soon()).ok());
  std::array<std::byte, 1> buffer{};
  // The limit is 3. The five strangers and the store's connection were six, so the oldest three
  // were closed.
  for (size_t i = 0; i < 3; ++i) {
    os::PollItem item{.target = strangers[i].get(), .want_read = true};
    EXPECT_TRUE(system_->poll(std::span(&item, 1), soon()));
    EXPECT_FALSE(strangers[i]->try_recv(buffer).ok()) << i;
  }
  for (size_t i = 3; i < 5; ++i) EXPECT_TRUE(strangers[i]->try_recv(buffer).ok()) << i;
  EXPECT_NE(log_.text().find("have not proved themselves"), std::string::npos) << log_.text();
}

// A stranger can send a greeting without the token. So strangers that have sent one must not be
// preferred to a new connection whose greeting the server has not read yet.
TEST_F(StrangersTest, ThoseThatOnlyGreetDoNotKeepRanksOut) {
  const auto server = start({.max_strangers = 8, .greeting_timeout = kNeverLate});
  const std::string hello = hello_of_build(std::string(store::this_build()));
  const auto first = connect(*server).value_or_throw();
  std::vector<std::unique_ptr<os::Socket>> strangers;
  const auto add_stranger = [&] {
    auto socket = system_->connect(server->address(), soon()).value_or_throw();
    EXPECT_TRUE(socket->try_send(wire::as_bytes(hello)).ok());
    os::PollItem item{.target = socket.get(), .want_read = true};
    // The stranger has been greeted or dropped.
    EXPECT_TRUE(system_->poll(std::span(&item, 1), soon()));
    strangers.push_back(std::move(socket));
  };
  for (int i = 0; i < 8; ++i) add_stranger();
  for (int i = 0; i < 5; ++i) {
    const Deadline limit = system_->deadline_in(milliseconds(400));
    EXPECT_TRUE(
        TcpStore::connect(*system_, {.address = server->address(), .token = "secret"}, limit).ok());
    EXPECT_TRUE(first->leave_will("k", "v", limit).ok());
    add_stranger();
    add_stranger();
  }
}

// If the server drops a connection of a rank before it was greeted, the rank connects again. This
// also holds for a connection that is not the first one of its store.
TEST_F(StrangersTest, ARankThatIsDroppedForThemConnectsAgain) {
  const auto server = start({.max_strangers = 1, .greeting_timeout = kNeverLate});
  const auto store = connect(*server).value_or_throw();
  std::atomic<bool> is_over = false;
  const auto flood = system_->spawn("strangers", [&] {
    while (!is_over) static_cast<void>(system_->connect(server->address(), soon()));
  });
  int num_failures = 0;
  for (int i = 0; i < 300; ++i) num_failures += store->leave_will("k", "v", soon()).ok() ? 0 : 1;
  is_over = true;
  flood->join();
  EXPECT_EQ(num_failures, 0);
}

// The server needs several descriptors. If it cannot open one of them, start() returns an error.
TEST(Strangers, AServerWithoutADescriptorIsAnErrorOfItsStart) {
  const auto result = testing::run_ranks_as_processes(1, [](testing::RankContext& context) {
    const rlimit few{.rlim_cur = 64, .rlim_max = 64};
    require(::setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
    std::vector<os::Fd> taken;
    for (os::Fd fd(::dup(0)); fd.is_open(); fd = os::Fd(::dup(0))) taken.push_back(std::move(fd));
    for (size_t num_free = 0; num_free < 6; ++num_free) {
      const auto server = TcpStoreServer::start(context.system, {.token = "secret"});
      context.output += server.ok() ? "+" : "-";
      taken.pop_back();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  // Start fails ("-") with 0 to 3 free descriptors and succeeds ("+") with more. The server needs
  // four: a listener, a stop event, a spare descriptor and an epoll instance.
  EXPECT_EQ(result.ranks[0].output, "----++");
}

}  // namespace
}  // namespace cadre
