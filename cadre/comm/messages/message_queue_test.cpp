// How the queue of messages sleeps and wakes, counted in the simulator.
#include <gtest/gtest.h>

#include <array>
#include <chrono>

#include "cadre/comm/communicator.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"
#include "cadre/testing/seeds.h"
#include "cadre/testing/simulator_ranks.h"

namespace cadre {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;
using testing::SimulatedRanksResult;

constexpr DType kType = DType::kUint8;

using Message = std::array<std::byte, 100>;

class MessageQueueTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  static SimulatedRanksResult run(uint64_t seed,
                                  const std::function<void(RankContext&, Communicator&)>& body) {
    std::shared_ptr<HashStore> store;
    sim::SimOptions options;
    options.max_nap = hours(1);  // a lost wake-up becomes a time-out
    options.spurious_wake_probability = 0;
    return testing::run_ranks_in_simulator(seed, options, 2, [&](RankContext& context) {
      if (store == nullptr) store = std::make_shared<HashStore>(context.system);
      CommunicatorOptions group_options;
      group_options.transport = GetParam();
      const Membership membership{context.rank, 2, 1, store, "token"};
      const auto group = Communicator::connect(context.system, membership, group_options,
                                               context.system.deadline_in(seconds(20)));
      body(context, *group);
      group->close(context.system.deadline_in(seconds(5)));
    });
  }

  static void pause(RankContext& context, Duration time) {
    context.system.make_waiter()->park(context.system.deadline_in(time));
  }

  // Rank 0 waits for a message that rank 1 sends after that time: rank 0's scheduling points.
  static int64_t points_of_a_receive(uint64_t seed, bool is_async, Duration time) {
    const auto result = run(seed, [&](RankContext& context, Communicator& group) {
      Message message{};
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

// An idle queue sleeps: ten times the wait costs no more looks. (What differs is how bytes are cut
// into sends, which the seed decides at another moment.)
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

// Who posts while another thread waits with the progress role must wake it.
TEST_P(MessageQueueTest, AMessagePostedDuringAWaitGoesAtOnce) {
  for (const uint64_t seed : testing::test_seeds(100)) {
    const auto result = run(seed, [&](RankContext& context, Communicator& group) {
      Message first{};
      Message second{};
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

INSTANTIATE_TEST_SUITE_P(Transports, MessageQueueTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         [](const auto& choice) {
                           return choice.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace cadre
