// Tests a group whose last handle is destroyed in a thread that the group would have to join, a
// group that is closed in such a thread, and a log whose lines throw in threads and destructors of
// the group.
#include "cadre/core/comm/group_destruction.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::failure_of;
using testing::RankContext;
using testing::require;

using Handle = std::shared_ptr<Communicator>;

// A function that releases the last handle in a thread that the test chooses. The memory of the
// operations is kept until the test ends.
using LetGo = std::function<void(Handle)>;

// Each rank has a store of its own, which is destroyed with its group.
Handle connect(os::System& system, Rank rank, const std::shared_ptr<Store>& store,
               const CommunicatorOptions& options) {
  const Membership membership{rank, 2, 1, std::make_shared<PrefixStore>("job", store), "token"};
  return Communicator::connect(system, membership, options, system.deadline_in(seconds(20)));
}

// Runs two ranks whose groups end in another thread, and expects that they leave no thread or file
// descriptor behind.
void expect_ended(const LetGo& let_go, const CommunicatorOptions& options = {}) {
  const testing::Resources before = testing::count_resources();
  const auto system = os::make_native_system();
  {
    const auto store = std::make_shared<HashStore>(*system);
    const auto result = testing::run_ranks_as_threads(
        2, [&](RankContext& context) { let_go(connect(*system, context.rank, store, options)); });
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

// Destroys the group in a thread of the group. The call must return at once, because the group
// cannot end before that thread returns.
void reset_last(Handle last) {
  const std::weak_ptr<Store> store = last->membership().store;
  last.reset();
  require(!store.expired(), "the group ends after what it runs in this thread");
}

void nap(const Communicator& group) {
  os::System& system = group.system();
  system.make_waiter()->park(system.deadline_in(std::chrono::milliseconds(20)));
}

// Rank 1 is late, so rank 0 most likely runs the operation itself while it waits.
TEST(OwnThread, ACallerThatWaitsMayDestroyTheGroup) {
  expect_ended([](Handle group) {
    Communicator& issuer = *group;
    if (issuer.rank() == 1) nap(issuer);
    std::string failure;
    std::shared_ptr<void> kept(nullptr, [&failure, last = std::move(group)](void*) mutable {
      // If an operation ends at once, the options of its call hold the last reference. They are
      // destroyed in a thread that runs no code of the group.
      if (!must_end_elsewhere(*last)) return last.reset();
      failure = failure_of([&] { reset_last(std::move(last)); });
    });
    const Work work = issuer.barrier_async({.keep_alive = std::move(kept)});
    work.wait();
    require(failure.empty(), failure);
  });
}

// Runs `act` on rank 0 in the thread for callbacks. Rank 1 enters the operation only when the
// callback is registered and the code that registered it no longer uses the group.
void act_in_callback(Handle group, const std::function<void(Handle)>& act) {
  std::array<int64_t, 1> word{};
  Communicator& issuer = *group;
  if (issuer.rank() == 1) {
    issuer.recv(std::as_writable_bytes(std::span(word)), DType::kInt64, 0, 0);
    issuer.barrier();
    return;
  }
  std::promise<void> may_act;
  std::promise<std::string> failure;
  const Work work = issuer.barrier_async();
  work.on_completed([&, kept = std::move(group)](const auto&) mutable {
    may_act.get_future().wait();
    failure.set_value(failure_of([&] { act(std::move(kept)); }));
  });
  issuer.send(std::as_bytes(std::span(word)), DType::kInt64, 1, 0);
  may_act.set_value();
  const std::string text = failure.get_future().get();
  require(text.empty(), text);
}

TEST(OwnThread, ACallbackMayDestroyTheGroup) {
  expect_ended([](Handle group) { act_in_callback(std::move(group), reset_last); });
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
    act_in_callback(group, [](const Handle& same) {
      const std::string failure =
          failure_of([&] { same->close(same->system().deadline_in(seconds(1))); });
      require(
          failure.starts_with("kInvalidArgument: close on group \"world\"") &&
              failure.find("called close(), which would wait for that caller") != std::string::npos,
          failure);
    });
    group->close(group->system().deadline_in(seconds(20)));
  });
}

// Runs `act` on each of two groups in a callback of the other group, at the same time.
void act_crosswise(const Handle& world, const std::function<void(Handle)>& act) {
  const Deadline limit = world->system().deadline_in(seconds(20));
  const int peer = 1 - world->rank().value;
  std::array<int64_t, 2> received{};
  std::array<std::promise<void>, 2> called;
  std::latch may_act(3);  // counts down when each callback runs, and when the messages are sent
  std::array<Handle, 2> groups;
  for (Handle& group : groups) group = split(*world, {.color = 0}, limit);
  for (size_t i = 0; i < 2; ++i) {
    const Work work = groups[i]->recv_async(
        std::as_writable_bytes(std::span(received).subspan(i, 1)), DType::kInt64, peer, 0);
    work.on_completed([&, i, other = groups[1 - i]](const auto&) mutable {
      may_act.arrive_and_wait();
      act(std::move(other));
      called[i].set_value();
    });
  }
  world->barrier();  // both ranks have registered their callbacks before a message arrives
  const std::array<int64_t, 1> sent{};
  for (Handle& group : groups) {
    group->send(std::as_bytes(std::span(sent)), DType::kInt64, peer, 0);
    group.reset();
  }
  may_act.count_down();
  for (auto& call : called) call.get_future().wait();
}

TEST(OwnThread, CallbacksOfTwoGroupsMayDestroyEachOthersGroup) {
  expect_ended([](const Handle& world) {
    act_crosswise(world, [](Handle other) { other.reset(); });
    world->barrier();
  });
}

TEST(OwnThread, OfCallbacksThatCloseEachOthersGroupOneIsRefused) {
  expect_ended([](const Handle& world) {
    std::mutex mutex;
    std::string failures;
    act_crosswise(world, [&](const Handle& other) {
      const std::string failure =
          failure_of([&] { other->close(other->system().deadline_in(seconds(20))); });
      const std::lock_guard lock(mutex);
      failures += failure;
    });
    require(failures.find("kInvalidArgument: close on group") == 0, failures);
    require(failures.find("a callback of another group") != std::string::npos, failures);
    world->barrier();
  });
}

class ThrowingLog final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view) override {
    throw std::runtime_error("the disk of the log is full");
  }
};

// The last collectives of the ranks differ, so the destructors and the plane's threads log a
// mismatch. The log throws, which must not end the process.
TEST(OwnThread, ALogThatThrowsEndsNoProcess) {
  expect_ended(
      [](const Handle& group) {
        group->barrier();
        std::array<int64_t, 1> sent{};
        std::array<int64_t, 1> received{};
        group->broadcast(std::as_writable_bytes(std::span(sent)), DType::kInt64, group->rank());
        // A small broadcast returns on its root without the other rank. The messages return only
        // when both ranks have called it; they are numbered separately from collectives.
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
