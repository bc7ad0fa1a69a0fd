// Tests send and recv of a Communicator, on threads, over shared memory and over TCP.
#include "cadre/core/comm/messages/point_to_point.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <span>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::RanksResult;
using testing::require;
using ::testing::StartsWith;

constexpr Duration kMessageBudget = seconds(20);
constexpr DType kElementType = DType::kInt32;

using Values = std::vector<int32_t>;

ConstBytes in_bytes(const Values& values) {
  return std::as_bytes(std::span(values));
}
Bytes out_bytes(Values& values) {
  return std::as_writable_bytes(std::span(values));
}

// Returns the values of message `index` of rank `from`. Receivers compare with them.
Values values_of(int from, int index, size_t count) {
  Values values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = from * 1'000'003 + index * 1009 + static_cast<int32_t>(i % 997);
  }
  return values;
}

class PointToPointTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  // The output of each rank is the text of its error.
  static RanksResult run(
      int world_size, const std::function<void(RankContext&, Communicator&)>& body,
      Duration timeout = kMessageBudget,
      std::string (*describe)(const std::function<void()>&) = testing::failure_of) {
    const auto system = os::make_native_system();
    const auto store = std::make_shared<HashStore>(*system);
    return testing::run_ranks_as_threads(world_size, [&](RankContext& context) {
      CommunicatorOptions options;
      options.timeout = timeout;
      options.transport = GetParam();
      const Membership membership{context.rank, context.world_size, 1, store, "token"};
      const auto group = Communicator::connect(context.system, membership, options,
                                               context.system.deadline_in(kMessageBudget));
      context.output = describe([&] { body(context, *group); });
      group->close(context.system.deadline_in(kMessageBudget));
    });
  }

  // Does the same as run(), but the output of a rank contains the fields of its error.
  static RanksResult run_for_fields(int world_size,
                                    const std::function<void(RankContext&, Communicator&)>& body) {
    return run(world_size, body, kMessageBudget, testing::failed_fields_of);
  }

  static void expect_well(const RanksResult& result) {
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
  }
};

TEST_P(PointToPointTest, MessagesOfOneTagArriveInOrderWhateverTheirSizes) {
  const std::vector<size_t> counts = {1, 0, 4096, 4097, 3, 1'000'000, 0, 5000, 2};
  expect_well(run(2, [&](RankContext& context, Communicator& group) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const Values sent = values_of(0, static_cast<int>(i), counts[i]);
      if (context.rank == 0) {
        group.send(in_bytes(sent), kElementType, 1, 7);
      } else {
        Values received(counts[i], -1);
        group.recv(out_bytes(received), kElementType, 0, 7);
        require(received == sent, format("message {} of {} elements", i, counts[i]));
      }
    }
  }));
}

// Each rank sends to all others before it receives. The messages are so long that each send waits
// for its receive.
TEST_P(PointToPointTest, MessagesThatAreIssuedTogetherNeedNoOrder) {
  constexpr size_t kCount = 100'000;
  constexpr int kTag = 3;
  expect_well(run(4, [&](RankContext& context, Communicator& group) {
    const int self = context.rank.value;
    std::vector<Values> sent;
    std::vector<Values> received(4, Values(kCount, -1));
    for (int peer = 0; peer < 4; ++peer) sent.push_back(values_of(self, peer, kCount));
    std::vector<MessageCall> calls;
    for (const OpKind kind : {OpKind::kSend, OpKind::kRecv}) {
      for (int peer = 0; peer < 4; ++peer) {
        const auto at = static_cast<size_t>(peer);
        if (peer == self) continue;
        calls.push_back(kind == OpKind::kSend
                            ? MessageCall::send(in_bytes(sent[at]), kElementType, peer, kTag)
                            : MessageCall::recv(out_bytes(received[at]), kElementType, peer, kTag));
      }
    }
    const std::vector<Work> works = group.issue(calls);
    require(works.size() == calls.size(), "one Work for each");
    for (const Work& work : works) work.wait();
    for (int peer = 0; peer < 4; ++peer) {
      if (peer == self) continue;
      require(received[static_cast<size_t>(peer)] == values_of(peer, self, kCount),
              format("from rank {}", peer));
    }
  }));
}

TEST_P(PointToPointTest, OfMessagesThatAreIssuedTogetherAllAreIssuedOrNone) {
  expect_well(run(2, [&](RankContext& context, Communicator& group) {
    require(group.issue(std::span<const MessageCall>()).empty(), "none");
    Values values(10, 1);
    const int other = 1 - context.rank.value;
    const std::array<MessageCall, 2> calls = {
        MessageCall::send(in_bytes(values), kElementType, other, 1),
        MessageCall::send(in_bytes(values), kElementType, 2, 1)};
    const std::string said = testing::failure_of([&] { (void)group.issue(calls); });
    require(said == format("kInvalidArgument: send on group \"world\", rank {}: the peer 2 is not "
                           "in the group of 2 ranks",
                           context.rank),
            said);
    // If one of the calls of the refused list had sent anything, it would be received here.
    const Values mine = values_of(context.rank.value, 0, 10);
    const std::array<MessageCall, 2> others = {
        MessageCall::send(in_bytes(mine), kElementType, other, 1),
        MessageCall::recv(out_bytes(values), kElementType, kAnySource, 1)};
    for (const Work& work : group.issue(others)) work.wait();
    require(values == values_of(other, 0, 10), "the second message");
  }));
}

TEST_P(PointToPointTest, TagsAreReceivedInAnyOrder) {
  constexpr int kTags = 12;
  const auto count_of = [](int tag) { return tag % 2 == 0 ? size_t{100} : size_t{50'000}; };
  expect_well(run(2, [&](RankContext& context, Communicator& group) {
    std::vector<Values> data;
    std::vector<Work> works;
    for (int i = 0; i < kTags; ++i) {
      const int tag = context.rank == 0 ? i : kTags - 1 - i;
      if (context.rank == 0) {
        data.push_back(values_of(0, tag, count_of(tag)));
        works.push_back(group.send_async(in_bytes(data.back()), kElementType, 1, tag));
      } else {
        Values received(count_of(tag), -1);
        group.recv(out_bytes(received), kElementType, 0, tag);
        require(received == values_of(0, tag, count_of(tag)), format("tag {}", tag));
      }
    }
    for (const Work& work : works) work.wait();
  }));
}

TEST_P(PointToPointTest, AllRanksSendFirstAndThenReceiveFromAll) {
  constexpr size_t kCount = 1 << 20;  // the messages have 4 MB each
  expect_well(run(4, [&](RankContext& context, Communicator& group) {
    const Values mine = values_of(context.rank.value, 0, kCount);
    std::vector<Work> sends;
    for (int peer = 0; peer < context.world_size; ++peer) {
      if (context.rank != peer)
        sends.push_back(group.send_async(in_bytes(mine), kElementType, peer, 1));
    }
    for (int peer = 0; peer < context.world_size; ++peer) {
      if (context.rank == peer) continue;
      Values received(kCount, -1);
      group.recv(out_bytes(received), kElementType, peer, 1);
      require(received == values_of(peer, 0, kCount), format("from rank {}", peer));
    }
    for (const Work& work : sends) work.wait();
  }));
}

TEST_P(PointToPointTest, AShortSendReturnsBeforeItsReceiveBegins) {
  expect_well(run(2, [&](RankContext& context, Communicator& group) {
    const int other = 1 - context.rank.value;
    for (int i = 0; i < 10; ++i) {
      group.send(in_bytes(values_of(context.rank.value, i, 1000)), kElementType, other, i);
    }
    group.barrier();
    for (int i = 9; i >= 0; --i) {
      Values received(1000, -1);
      group.recv(out_bytes(received), kElementType, other, i);
      require(received == values_of(other, i, 1000), format("tag {}", i));
    }
  }));
}

TEST_P(PointToPointTest, MessagesAndCollectivesDoNotDisturbEachOther) {
  expect_well(run(3, [&](RankContext& context, Communicator& group) {
    const int next = (context.rank.value + 1) % context.world_size;
    const int previous = (context.rank.value + 2) % context.world_size;
    for (int step = 0; step < 20; ++step) {
      const Values sent = values_of(context.rank.value, step, 10'000);
      Values received(sent.size(), -1);
      const Work receive = group.recv_async(out_bytes(received), kElementType, previous, 0);
      const Work send = group.send_async(in_bytes(sent), kElementType, next, 0);
      Values ones(100, 1);
      group.all_reduce(out_bytes(ones), out_bytes(ones), kElementType, ReduceOp::kSum);
      require(ones == Values(100, context.world_size), "all_reduce");
      receive.wait();
      send.wait();
      require(received == values_of(previous, step, sent.size()), format("step {}", step));
    }
  }));
}

TEST_P(PointToPointTest, AnotherSizeIsNamedOnBothRanks) {
  for (const size_t count : {4UL, 100'000UL}) {
    const auto result = run(2, [&](RankContext& context, Communicator& group) {
      Values values(count + static_cast<size_t>(context.rank.value), 1);
      if (context.rank == 0) {
        group.send(in_bytes(values), kElementType, 1, 3);
        group.barrier();
      } else {
        group.recv(out_bytes(values), kElementType, 0, 3);
      }
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    EXPECT_THAT(result.ranks[1].output,
                StartsWith("kInvalidArgument: recv #1 on group \"world\" failed after "));
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output,
                  ContainsRegex(format("tag 3: the ranks disagree: rank 0 .* sent {} bytes of "
                                       "int32, rank 1 .* receives {} bytes of int32",
                                       count * 4, (count + 1) * 4)));
      EXPECT_THAT(rank.output,
                  HasSubstr("Remedy: let each send have one recv with its tag, number of elements "
                            "and dtype."));
    }
  }
}

TEST_P(PointToPointTest, AnotherTypeIsNamed) {
  const auto result = run_for_fields(2, [&](RankContext& context, Communicator& group) {
    Values values(4, 1);
    group.barrier();
    if (context.rank == 0) group.send(in_bytes(values), DType::kFloat32, 1, 3);
    if (context.rank == 1) group.recv(out_bytes(values), kElementType, 0, 3);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[1].output, "kInvalidArgument culprit=0 operation=recv#1");
}

TEST_P(PointToPointTest, ATimeoutNamesThePeerAndTheTag) {
  const auto result = run(2, [&](RankContext& context, Communicator& group) {
    Values values(100'000, 1);
    const CollectiveOptions soon{.deadline = context.system.deadline_in(milliseconds(200))};
    if (context.rank == 0) group.send(in_bytes(values), kElementType, 1, 42, soon);
    if (context.rank == 1) group.recv(out_bytes(values), kElementType, 0, 43);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              StartsWith("kTimeout: send #1 on group \"world\" timed out after "));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("\n  tag 42: waiting for rank 1 ("));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("last seen in recv #1, receive, "));
  EXPECT_THAT(result.ranks[1].output, HasSubstr("tag 42: waiting for rank 1 ("));
}

TEST_P(PointToPointTest, ATimeoutNamesTheTagOfAMessageThatNoRecvTakes) {
  const auto result = run(3, [&](RankContext& context, Communicator& group) {
    Values values(4, 1);
    if (context.rank == 1) group.send(in_bytes(values), kElementType, 0, 9);
    group.barrier();
    const CollectiveOptions soon{.deadline = context.system.deadline_in(milliseconds(200))};
    if (context.rank == 0) group.recv(out_bytes(values), kElementType, 1, 7, soon);
    if (context.rank != 0) group.barrier();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              HasSubstr("\n  tag 7 (a message with tag 9 from rank 1 has arrived, which no recv "
                        "takes): waiting for rank 1 ("));
}

TEST_P(PointToPointTest, SendsThatWaitForEachOtherAreToldWhatToCallInstead) {
  const auto result = run(2, [&](RankContext& context, Communicator& group) {
    Values values(100'000, 1);
    const int other = 1 - context.rank.value;
    const auto time = context.rank == 0 ? milliseconds(300) : milliseconds(20'000);
    group.send(in_bytes(values), kElementType, other, 1,
               {.deadline = context.system.deadline_in(time)});
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(
      result.ranks[0].output,
      HasSubstr(
          "Remedy: use send_async or batch_send_recv, because each of these ranks "
          "waits in a send for the recv of the next; then restart the job or call rejoin()."));
}

TEST_P(PointToPointTest, APeerThatLeftIsNamed) {
  const auto result = run_for_fields(2, [&](RankContext& context, Communicator& group) {
    Values values(4, 1);
    if (context.rank == 0) group.recv(out_bytes(values), kElementType, 1, 5);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, "kPeerLost culprit=1 operation=recv#1");
}

TEST_P(PointToPointTest, MoreThanARankHoldsIsRefused) {
  constexpr int kNumMessages = 300;  // they have 16 KiB each, together more than 4 MiB
  const auto result = run(2, [&](RankContext& context, Communicator& group) {
    Values values(4096, 1);
    if (context.rank == 0) {
      for (int i = 0; i < kNumMessages; ++i) group.send(in_bytes(values), kElementType, 1, 1);
    } else {
      group.recv(out_bytes(values), kElementType, 0, 2);
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[1].output, StartsWith("kInvalidArgument: recv #1"));
  EXPECT_THAT(result.ranks[1].output,
              ContainsRegex("of messages, the first with tag 1, that rank 1 .* has not received"));
}

TEST_P(PointToPointTest, MoreThanARankHoldsIsRefusedToAReceiveOfAnyRank) {
  constexpr int kNumMessages = 300;
  const auto result = run_for_fields(2, [&](RankContext& context, Communicator& group) {
    Values values(4096, 1);
    if (context.rank == 0) {
      for (int i = 0; i < kNumMessages; ++i) group.send(in_bytes(values), kElementType, 1, 1);
    } else {
      group.recv_from_any(out_bytes(values), kElementType, 2);
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[1].output, "kInvalidArgument operation=recv#1");
}

TEST_P(PointToPointTest, ABadPeerIsRefused) {
  const auto result = run(2, [&](RankContext& context, Communicator& group) {
    Values values(4, 1);
    const auto self =
        testing::failure_of([&] { group.send(in_bytes(values), kElementType, context.rank, 0); });
    require(self.find("is this rank itself; copy the data instead") != std::string::npos, self);
    const auto unknown =
        testing::failure_of([&] { group.recv(out_bytes(values), kElementType, 2, 0); });
    require(unknown.find("the peer 2 is not in the group of 2 ranks") != std::string::npos,
            unknown);
  });
  expect_well(result);
}

INSTANTIATE_TEST_SUITE_P(Transports, PointToPointTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         [](const auto& choice) {
                           return choice.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace cadre
