// A group of which the last handle goes in a thread that the group would have to join, a group that
// is closed there, and a log whose lines throw in threads and destructors of the group.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/comm/communicator.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/leftovers.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::failure_of;
using testing::RankContext;
using testing::require;

using Handle = std::shared_ptr<Communicator>;

// Lets the last handle go; the memory of operations lives as long as the test.
using LetGo = std::function<void(Handle)>;

// The groups of two ranks end in threads of their own, and nothing is left of them.
void expect_ended(const LetGo& let_go, const CommunicatorOptions& options = {}) {
  const testing::Resources before = testing::count_resources();
  const auto system = os::make_native_system();
  {
    const auto store = std::make_shared<HashStore>(*system);
    const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
      const Membership membership{context.rank, 2, 1, store, "token"};
      let_go(Communicator::connect(*system, membership, options, system->deadline_in(seconds(20))));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  const Deadline limit = system->deadline_in(seconds(20));
  while (!testing::leftovers_since(before).empty() && !limit.has_passed(system->now())) {
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(OwnThread, TheDeleterOfAKeepAliveMayDestroyTheGroup) {
  expect_ended([](Handle group) {
    Communicator& issuer = *group;
    const auto kept = std::make_shared<Handle>(std::move(group));
    static_cast<void>(issuer.barrier_async({.keep_alive = kept}));
  });
}

TEST(OwnThread, ACallerThatWaitsMayDestroyTheGroup) {
  expect_ended([](Handle group) {
    Communicator& issuer = *group;
    auto kept = std::make_shared<Handle>(std::move(group));
    const Work work = issuer.barrier_async({.keep_alive = std::move(kept)});
    work.wait();
  });
}

TEST(OwnThread, ACallbackMayDestroyTheGroup) {
  expect_ended([](Handle group) {
    const Work work = group->barrier_async();
    std::promise<void> called;
    work.on_completed([kept = std::move(group), &called](const auto&) mutable {
      kept.reset();
      called.set_value();
    });
    called.get_future().wait();
  });
}

TEST(OwnThread, TheOwnerOfAMessageMayDestroyTheGroup) {
  expect_ended([](Handle group) {
    Communicator& issuer = *group;
    const int peer = 1 - issuer.rank().value;
    const CollectiveOptions options{.keep_alive = std::make_shared<Handle>(std::move(group))};
    static_cast<void>(issuer.rank() == 0 ? issuer.send_async({}, DType::kInt64, peer, 0, options)
                                         : issuer.recv_async({}, DType::kInt64, peer, 0, options));
  });
}

TEST(OwnThread, ACallbackCannotCloseTheGroup) {
  expect_ended([](const Handle& group) {
    std::promise<std::string> said;
    const Work work = group->barrier_async();
    work.on_completed([&](const auto&) {
      said.set_value(failure_of([&] { group->close(group->system().deadline_in(seconds(1))); }));
    });
    const std::string failure = said.get_future().get();
    // Called here, if the operation had ended before.
    require(failure.empty() || failure.find("close on group \"world\"") != std::string::npos,
            failure);
    require(failure.empty() || failure.starts_with("kInvalidArgument"), failure);
    work.wait();
    group->close(group->system().deadline_in(seconds(20)));
  });
}

class ThrowingLog final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view) override {
    throw std::runtime_error("the disk of the log is full");
  }
};

// The ranks end after different collectives, which the destructors log, and the plane's threads.
TEST(OwnThread, ALogThatThrowsEndsNoProcess) {
  expect_ended(
      [](const Handle& group) {
        group->barrier();
        std::array<int64_t, 1> sent{};
        std::array<int64_t, 1> received{};
        group->broadcast(std::as_writable_bytes(std::span(sent)), DType::kInt64, group->rank());
        // A small broadcast ends on its root alone. The messages return when both have called it:
        // they are numbered apart from collectives.
        const int peer = 1 - group->rank().value;
        const Work sending =
            group->send_async(std::as_bytes(std::span(sent)), DType::kInt64, peer, 0);
        group->recv(std::as_writable_bytes(std::span(received)), DType::kInt64, peer, 0);
        sending.wait();
      },
      {.transport = TransportChoice::kTcp, .log = std::make_shared<ThrowingLog>()});
}

}  // namespace
}  // namespace cadre
