// Tests message spaces: messages of the program and of two wrappers with equal tags are never
// mistaken for each other.
#include "cadre/core/comm/message_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::RanksResult;
using testing::require;

constexpr Duration kSpacesBudget = seconds(20);
constexpr DType kSpaceType = DType::kInt32;
constexpr int kTag = 2;

using Values = std::vector<int32_t>;

class MessageSpaceTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  // The output of each rank is the text of its error.
  static RanksResult run(int world_size,
                         const std::function<void(RankContext&, Communicator&)>& body) {
    const auto system = os::make_native_system();
    const auto store = std::make_shared<HashStore>(*system);
    return testing::run_ranks_as_threads(world_size, [&](RankContext& context) {
      CommunicatorOptions options;
      options.timeout = kSpacesBudget;
      options.transport = GetParam();
      const Membership membership{context.rank, context.world_size, 1, store, "token"};
      const auto group = Communicator::connect(context.system, membership, options,
                                               context.system.deadline_in(kSpacesBudget));
      context.output = testing::failure_of([&] { body(context, *group); });
      group->close(context.system.deadline_in(kSpacesBudget));
    });
  }

  static void expect_well(const RanksResult& result) {
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
  }

  static Work send(Communicator& group, const MessageSpace& space, const Values& values) {
    const MessageCall call =
        MessageCall::send(std::as_bytes(std::span(values)), kSpaceType, 1, kTag);
    return issue_messages(group, space, {&call, 1}, {}).front();
  }
  static int32_t receive(Communicator& group, const MessageSpace& space, size_t count,
                         Rank source) {
    Values values(count, -1);
    run_message(
        group, space,
        MessageCall::recv(std::as_writable_bytes(std::span(values)), kSpaceType, source, kTag), {});
    require(values.front() == values.back(), "one message");
    return values.front();
  }
};

// The messages arrive in the order in which they are sent, and the receives are called in the
// reverse order.
TEST_P(MessageSpaceTest, AReceiveTakesMessagesOfItsOwnSpaceOnly) {
  // An eager message, and one that waits for its receive.
  for (const size_t count : {size_t{3}, size_t{100'000}}) {
    for (const Rank source : {Rank(0), kAnySource}) {
      expect_well(run(2, [&](RankContext& context, Communicator& group) {
        const MessageSpace first = reserve_message_space(group, "first");
        const MessageSpace second = reserve_message_space(group, "second");
        if (context.rank == 0) {
          const std::vector<Values> sent = {Values(count, 10), Values(count, 20),
                                            Values(count, 30)};
          const std::vector<Work> works = {send(group, {}, sent[0]), send(group, first, sent[1]),
                                           send(group, second, sent[2])};
          for (const Work& work : works) work.wait();
        } else {
          require(receive(group, second, count, source) == 30, "of the second wrapper");
          require(receive(group, first, count, source) == 20, "of the first wrapper");
          require(receive(group, {}, count, source) == 10, "of the program");
        }
      }));
    }
  }
}

// The receives are posted before the messages arrive.
TEST_P(MessageSpaceTest, AMessageGoesToTheReceiveOfItsSpace) {
  expect_well(run(2, [&](RankContext& context, Communicator& group) {
    const MessageSpace space = reserve_message_space(group, "wrapper");
    if (context.rank == 0) {
      group.barrier();
      const Values of_wrapper(3, 20);
      const Values of_program(3, 10);
      send(group, space, of_wrapper).wait();
      send(group, {}, of_program).wait();
    } else {
      Values of_program(3, -1);
      Values of_wrapper(3, -1);
      const auto post = [&](const MessageSpace& of, Values& values) {
        const MessageCall call = MessageCall::recv(std::as_writable_bytes(std::span(values)),
                                                   kSpaceType, kAnySource, kTag);
        return issue_messages(group, of, {&call, 1}, {}).front();
      };
      const Work program = post({}, of_program);
      const Work wrapper = post(space, of_wrapper);
      group.barrier();
      program.wait();
      wrapper.wait();
      require(of_program == Values(3, 10), "the program has its message");
      require(of_wrapper == Values(3, 20), "the wrapper has its message");
    }
  }));
}

TEST_P(MessageSpaceTest, NumbersAgreeAlsoAfterOneRankHasReservedFewer) {
  expect_well(run(3, [&](RankContext& context, Communicator& group) {
    reserve_message_space(group, "lost");
    // This simulates that the call of rank 1 was refused before it could reserve a message space.
    if (context.rank == 1) CommunicatorParts::impl_of(group).num_message_spaces.store(0);
    const MessageSpace next = reserve_message_space(group, "next");
    require(next.number() == 2, "the same new number on all ranks");
    require(reserve_message_space(group, "last").number() == 3, "and the one after it");
  }));
}

TEST_P(MessageSpaceTest, DifferentUsersAreRefusedOnAllRanks) {
  const auto result = run(3, [&](RankContext& context, Communicator& group) {
    reserve_message_space(group, context.rank == 2 ? "cadre::A" : "cadre::B");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output,
                HasSubstr("rank 2 makes a different wrapper on this group than rank 0"));
  }
}

// Rank 0 sends a message of the program with the tag for which the wrapper waits, and leaves.
TEST_P(MessageSpaceTest, ErrorsNameTheWrapper) {
  const auto result = run(2, [&](RankContext& context, Communicator& group) {
    const MessageSpace space = reserve_message_space(group, "cadre::Pipeline");
    const Values values(3, 1);
    if (context.rank == 0) send(group, {}, values).wait();
    if (context.rank == 1) receive(group, space, 3, 0);
  });
  EXPECT_THAT(result.ranks[1].output, HasSubstr("tag 2 of cadre::Pipeline: rank 0"));
}

INSTANTIATE_TEST_SUITE_P(Transports, MessageSpaceTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         [](const auto& test) {
                           return test.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace cadre
