// Tests when the queue of messages sleeps and wakes, by counting scheduling points in the
// simulator.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/message_calls.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;
using testing::SimulatedRanksResult;

constexpr DType kType = DType::kUint8;

using Payload = std::array<std::byte, 100>;

// A System in which the threads for messages start late, as on a machine without a free core.
class LateThreads final : public testing::ForwardingSystem {
 public:
  LateThreads(os::System& inner, Duration delay) : ForwardingSystem(inner), delay_(delay) {}

  std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
    if (name != "cadre-messages") return inner_.spawn(std::move(name), std::move(body));
    return inner_.spawn(std::move(name), [this, body = std::move(body)] {
      const Deadline begin = inner_.deadline_in(delay_);
      while (inner_.make_waiter()->park(begin)) {
      }
      body();
    });
  }

 private:
  const Duration delay_;
};

class MessageQueueTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  struct Settings {
    Duration timeout = CommunicatorOptions().timeout;
    Duration thread_delay{0};
  };

  static SimulatedRanksResult run(uint64_t seed,
                                  const std::function<void(RankContext&, Communicator&)>& body) {
    return run(seed, body, Settings());
  }
  static SimulatedRanksResult run(uint64_t seed,
                                  const std::function<void(RankContext&, Communicator&)>& body,
                                  const Settings& settings) {
    std::shared_ptr<HashStore> store;
    sim::SimOptions options;
    options.max_nap = hours(1);  // a lost wake-up then causes a timeout
    options.spurious_wake_probability = 0;
    return testing::run_ranks_in_simulator(seed, options, 2, [&](RankContext& context) {
      if (store == nullptr) store = std::make_shared<HashStore>(context.system);
      CommunicatorOptions group_options;
      group_options.transport = GetParam();
      group_options.timeout = settings.timeout;
      LateThreads system(context.system, settings.thread_delay);
      const Membership membership{context.rank, 2, 1, store, "token"};
      const auto group = Communicator::connect(system, membership, group_options,
                                               context.system.deadline_in(seconds(20)));
      body(context, *group);
      group->close(context.system.deadline_in(seconds(5)));
    });
  }

  static void pause(RankContext& context, Duration time) {
    context.system.make_waiter()->park(context.system.deadline_in(time));
  }

  // Rank 0 waits for a message that rank 1 sends after `time`. Returns the number of scheduling
  // points of rank 0.
  static int64_t points_of_a_receive(uint64_t seed, bool is_async, Duration time) {
    const auto result = run(seed, [&](RankContext& context, Communicator& group) {
      Payload message{};
      if (context.rank == 1) {
        pause(context, time);
        group.send(message, kType, 0, 1);
      } else if (is_async) {
        group.recv_async(message, kType, 1, 1).wait();
      } else {
        group.recv(message, kType, 1, 1);
      }
    });
    EXPECT_TRUE(result.ok()) << "seed " << seed << ": " << result.failures();
    return result.sim.ranks[0].num_points;
  }
};

// An idle queue sleeps, so a wait of ten times the length needs no more scheduling points. (A small
// difference remains, because the seed decides how bytes are cut into sends.)
TEST_P(MessageQueueTest, ALongWaitTakesNoMoreLooksThanAShortOne) {
  constexpr int64_t kSlack = 30;
  for (const uint64_t seed : testing::test_seeds(10)) {
    for (const bool is_async : {false, true}) {
      const int64_t few = points_of_a_receive(seed, is_async, seconds(1));
      const int64_t many = points_of_a_receive(seed, is_async, seconds(10));
      EXPECT_LE(many, few + kSlack) << "seed " << seed;
    }
  }
}

// A thread that posts a message must wake the thread that waits and holds the progress role.
TEST_P(MessageQueueTest, AMessagePostedDuringAWaitGoesAtOnce) {
  for (const uint64_t seed : testing::test_seeds(100)) {
    const auto result = run(seed, [&](RankContext& context, Communicator& group) {
      Payload first{};
      Payload second{};
      if (context.rank == 0) {
        const Work receive = group.recv_async(first, kType, 1, 1);
        pause(context, seconds(1));
        const TimePoint before = context.system.now();
        group.send(second, kType, 1, 2);
        receive.wait();
        require(context.system.now() - before < seconds(1), "the message was not sent at once");
      } else {
        group.recv(second, kType, 0, 2);
        group.send(first, kType, 0, 1);
      }
    });
    ASSERT_TRUE(result.ok()) << "seed " << seed << ": " << result.failures();
  }
}

TEST_P(MessageQueueTest, AWaitEndsAtItsOwnDeadlineAndTheMessageGoesOn) {
  const auto result = run(1, [&](RankContext& context, Communicator& group) {
    Payload message{};
    if (context.rank == 1) {
      pause(context, seconds(10));
      message[99] = std::byte{7};
      return group.send(message, kType, 0, 1);
    }
    const Work receive = group.recv_async(message, kType, 1, 1);
    const TimePoint before = context.system.now();
    const std::string failure =
        testing::failure_of([&] { receive.wait(context.system.deadline_in(seconds(1))); });
    require(failure.find("recv #1 on group \"world\", rank 0: wait() has reached its deadline") !=
                std::string::npos,
            failure);
    require(context.system.now() - before < seconds(2), "the wait went on");
    receive.wait();
    require(message[99] == std::byte{7}, "the message");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The timeout is 2 s. A receive without a deadline starts 1 s after it was issued, and its message
// arrives 2.5 s after it was issued. So a timeout that counted from the issue would expire before.
TEST_P(MessageQueueTest, ADefaultDeadlineCountsFromTheStartOfTheMessage) {
  const auto result =
      run(1,
          [&](RankContext& context, Communicator& group) {
            Payload message{};
            group.barrier();
            if (context.rank == 1) {
              pause(context, milliseconds(2500));
              return group.send(message, kType, 0, 1);
            }
            group.recv_async(message, kType, 1, 1).wait(context.system.deadline_in(seconds(10)));
          },
          {.timeout = seconds(2), .thread_delay = seconds(1)});
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The queue's thread sleeps while a blocking call holds the progress role. When that call ends, one
// message is left for which no thread waits. The queue's thread must be woken then: otherwise it
// would notice the message only after IdleThread::kIdleTime, here at 2 s.
TEST_P(MessageQueueTest, TheThreadGoesOnAtOnceWithWhatABlockingCallLeaves) {
  const auto result = run(1, [&](RankContext& context, Communicator& group) {
    Payload first{};
    Payload second{};
    group.barrier();
    if (context.rank == 1) {
      pause(context, milliseconds(1400));
      group.send(first, kType, 0, 1);
      pause(context, milliseconds(100));
      return group.send(second, kType, 0, 2);
    }
    const TimePoint began = context.system.now();
    std::optional<Work> left;
    std::optional<TimePoint> ended;
    const auto poster = context.system.spawn("poster", [&] {
      pause(context, seconds(1));
      left = group.recv_async(second, kType, 1, 2);
      left->on_completed([&](const std::optional<Error>&) { ended = context.system.now(); });
    });
    group.recv(first, kType, 1, 1);
    poster->join();
    pause(context, seconds(5));
    require(ended.has_value(), "nobody received the second message");
    require(*ended - began < milliseconds(1800), "the thread slept on");
    left->wait();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The status page shows the oldest message for which the rank still waits.
TEST_P(MessageQueueTest, TheStatusShowsTheOldestMessageThatIsLeft) {
  const auto result = run(1, [&](RankContext& context, Communicator& group) {
    Payload first{};
    Payload second{};
    if (context.rank == 0) {
      const Work receives[] = {group.recv_async(first, kType, 1, 1),
                               group.recv_async(second, kType, 1, 2)};
      for (const Work& receive : receives) receive.wait();
      return;
    }
    const auto require_seen = [&](const std::string& call) {
      pause(context, seconds(1));
      const std::string seen = group.peers()[0].last_seen;
      require(seen.starts_with("last seen in " + call), seen);
    };
    require_seen("recv #1");
    group.send(first, kType, 0, 1);
    require_seen("recv #2");
    group.send(second, kType, 0, 2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A device writes the bytes of rank 1's first message 1 s after the send was issued. The messages
// after it with the same tag keep their order. A message with another tag, and a long message in
// the other direction, for which rank 1 must answer its sender, do not wait.
TEST_P(MessageQueueTest, ASendWaitsUntilItsBytesAreWritten) {
  for (const uint64_t seed : testing::test_seeds(10)) {
    const auto result = run(seed, [&](RankContext& context, Communicator& group) {
      std::vector<std::byte> large(100'000);
      Payload first{};
      Payload second{};
      Payload third{};
      if (context.rank == 1) {
        std::atomic<bool> is_written{false};
        const MessageCall late = MessageCall::send(first, kType, 0, 1);
        const Work work =
            issue_messages(group, {}, {&late, 1}, {}, [&] { return is_written.load(); }).front();
        second[5] = std::byte{2};
        const Work next = group.send_async(second, kType, 0, 1);
        const TimePoint before = context.system.now();
        group.send(third, kType, 0, 3);
        group.recv(large, kType, 0, 2);
        require(large.back() == std::byte{3}, "the long message");
        require(context.system.now() - before < milliseconds(500), "the receive waited");
        pause(context, seconds(1));
        require(!work.is_completed() && !next.is_completed(), "sent before it was written");
        first[5] = std::byte{1};
        is_written = true;
        work.wait();
        next.wait();
      } else {
        large.back() = std::byte{3};
        group.recv(third, kType, 1, 3);
        group.send(large, kType, 1, 2);
        group.recv(first, kType, 1, 1);
        group.recv(second, kType, 1, 1);
        require(first[5] == std::byte{1} && second[5] == std::byte{2}, "the messages in order");
      }
    });
    ASSERT_TRUE(result.ok()) << "seed " << seed << ": " << result.failures();
  }
}

// The rank whose device does not write the bytes is at fault, and not the peer, which waits for
// them; also if the send that ends first is one that waits behind the late one.
TEST_P(MessageQueueTest, ASendWhoseBytesAreNeverWrittenEndsAtTheTimeout) {
  for (const bool is_first_late : {true, false}) {
    const auto result =
        run(1,
            [&](RankContext& context, Communicator& group) {
              Payload payload{};
              if (context.rank == 0) return pause(context, seconds(5));
              const MessageCall late = MessageCall::send(payload, kType, 0, 1);
              const Duration patience = is_first_late ? seconds(2) : seconds(20);
              const Work first = issue_messages(group, {}, {&late, 1}, {.timeout = patience}, [] {
                                   return false;
                                 }).front();
              const Work second = group.send_async(payload, kType, 0, 1, {.timeout = seconds(3)});
              const std::string failure =
                  testing::failure_of([&] { (is_first_late ? first : second).wait(); });
              require(failure.starts_with("kTimeout: send #"), failure);
              require(failure.find("tag 1: the device of rank 1 ") != std::string::npos, failure);
              require(failure.find("has not copied the message to the host") != std::string::npos,
                      failure);
              require(group.error()->details().culprit == Rank(1), failure);
            },
            {.timeout = seconds(10)});
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, MessageQueueTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         [](const auto& choice) {
                           return choice.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace cadre
