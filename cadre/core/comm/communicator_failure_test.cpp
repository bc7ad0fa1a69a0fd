// Tests the errors on all ranks of a group when one rank fails, on threads, over shared memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::RanksResult;
using testing::require;
using ::testing::StartsWith;

constexpr Duration kFailureBudget = seconds(20);

using Describe = std::string (*)(const std::function<void()>&);

// Runs `body` on each rank of one group. The output of a rank is the text of its error.
RanksResult run_group(int world_size, Duration timeout,
                      const std::function<void(RankContext&, Communicator&)>& body,
                      Describe describe = testing::failure_of) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return testing::run_ranks_as_threads(world_size, [&](RankContext& context) {
    CommunicatorOptions options;
    options.timeout = timeout;
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    const auto group = Communicator::connect(context.system, membership, options,
                                             context.system.deadline_in(kFailureBudget));
    context.output = describe([&] { body(context, *group); });
    group->close(context.system.deadline_in(kFailureBudget));
  });
}

void sum(Communicator& group, size_t count) {
  std::vector<float> data(count, 1);
  const Bytes bytes = std::as_writable_bytes(std::span(data));
  group.all_reduce(bytes, bytes, DType::kFloat32, ReduceOp::kSum);
}

// Matches an error of `call`, or of a rank that received the failure before it began that call.
auto fails_at_or_before(const std::string& call, const std::string& before) {
  const std::string code = call.substr(0, call.find(' '));
  return AnyOf(StartsWith(call + " on group \"world\" failed after "),
               ::testing::AllOf(StartsWith(code + " group \"world\" failed on rank "),
                                HasSubstr(") after " + before + "\n")));
}

// Several ranks detect the mismatch. All errors must name the same pair of ranks.
TEST(CommunicatorFailure, DifferentCallsAreExplainedAlikeOnAllRanks) {
  const auto result = run_group(3, kFailureBudget, [](RankContext& context, Communicator& group) {
    group.barrier();
    sum(group, context.rank == 1 ? 4 : 8);
    for (int i = 0; i < 3; ++i) group.barrier();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const auto cause_in = [](const std::string& text) { return text.substr(text.find("\n  ")); };
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, fails_at_or_before("kInvalidArgument: all_reduce #2", "barrier #1"));
    EXPECT_EQ(cause_in(rank.output), cause_in(result.ranks[0].output));
    EXPECT_THAT(rank.output, HasSubstr("called all_reduce(sum, float32 x 4) as #2"));
    EXPECT_THAT(rank.output, HasSubstr("called all_reduce(sum, float32 x 8) as #2"));
    EXPECT_THAT(rank.output,
                HasSubstr("Remedy: pass tensors of one shape on all ranks, unless a rank has left "
                          "out an earlier call."));
  }
}

TEST(CommunicatorFailure, ARankThatEndsItsLoopEarlyIsSaidToHaveLeft) {
  const auto body = [](RankContext& context, Communicator& group) {
    const int num_steps = context.rank == 2 ? 3 : 5;
    for (int step = 0; step < num_steps; ++step) sum(group, 100);
  };
  const auto fields = run_group(3, kFailureBudget, body, testing::failed_fields_of);
  ASSERT_TRUE(fields.ok()) << fields.failures();
  EXPECT_EQ(fields.ranks[2].output, "");
  for (const size_t rank : {0, 1}) {
    // A rank may learn that rank 2 has left before it begins the fourth call.
    EXPECT_THAT(fields.ranks[rank].output,
                AnyOf("kPeerLost culprit=2 operation=all_reduce#4", "kPeerLost culprit=2"));
  }
  const auto texts = run_group(3, kFailureBudget, body);
  EXPECT_THAT(texts.ranks[0].output,
              HasSubstr(") left the group after #3 (it ended its loop early?). Remedy: restart the "
                        "job or call rejoin()."));
}

// Ranks 0 and 2 wait in a second all_reduce, which rank 1 does not call before the group has
// failed. The first operation has a long deadline, because the ranks of a busy machine do not start
// together.
void sum_without_rank_1(RankContext& context, Communicator& group) {
  const Deadline deadline = context.system.deadline_in(kFailureBudget);
  group.barrier({.deadline = deadline});
  const Monitor& monitor = *CommunicatorParts::impl_of(group).monitor;
  while (context.rank == 1 && !monitor.has_failed()) {
    require(!deadline.has_passed(context.system.now()), "the other ranks still wait");
    context.system.poll({}, context.system.deadline_in(milliseconds(10)));
  }
  sum(group, 10);
}

TEST(CommunicatorFailure, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const auto body = sum_without_rank_1;
  const auto result = run_group(3, milliseconds(300), body, testing::failed_fields_of);
  ASSERT_TRUE(result.ok()) << result.failures();
  const std::vector<std::string> waiting = {result.ranks[0].output, result.ranks[2].output};
  const std::string timeout = "kTimeout culprit=1 operation=all_reduce#2";
  EXPECT_THAT(waiting, ::testing::Contains(timeout));
  EXPECT_THAT(waiting,
              ::testing::Each(AnyOf(timeout, "kAborted culprit=1 operation=all_reduce#2")));
  EXPECT_THAT(result.ranks[1].output, StartsWith("kAborted culprit=1"));
}

TEST(CommunicatorFailure, ARankThatIsToldOfATimeoutQuotesIt) {
  const auto result = run_group(2, milliseconds(300), sum_without_rank_1);
  ASSERT_TRUE(result.ok()) << result.failures();
  const std::string& told = result.ranks[1].output;
  EXPECT_THAT(told, HasSubstr("\n  first failure: all_reduce #2 on group"));
  EXPECT_THAT(
      told,
      EndsWith(" ago. Remedy: look at the first failure, then restart the job or call rejoin()."));
  EXPECT_EQ(told.find("Remedy"), told.rfind("Remedy"));
}

// Rank 0 waits in a collective for rank 1, which waits for a message from rank 0. Another thread
// could still call the missing operation, so both waits last until the deadline. Then each error
// names the operation that the other rank runs.
TEST(CommunicatorFailure, ACollectiveAgainstARecvTellsAtTheDeadlineWhatTheOtherIsIn) {
  const auto system = os::make_native_system();
  for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    const auto store = std::make_shared<HashStore>(*system);
    const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
      const Membership membership{context.rank, 2, 1, store, "token"};
      const auto group = Communicator::connect(
          context.system, membership, {.timeout = milliseconds(300), .transport = transport},
          context.system.deadline_in(kFailureBudget));
      context.output = testing::failure_of([&] {
        group->barrier({.deadline = context.system.deadline_in(kFailureBudget)});
        std::byte data{};
        if (context.rank == 0) sum(*group, 10);
        if (context.rank == 1) group->recv(Bytes(&data, 1), DType::kUint8, 0, /*tag=*/7);
      });
      group->close(context.system.deadline_in(kFailureBudget));
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    const std::string& collective = result.ranks[0].output;
    const std::string& message = result.ranks[1].output;
    SCOPED_TRACE(collective + "\n" + message);
    const auto reduce_waits =
        ::testing::AllOf(HasSubstr("all_reduce #2 on group \"world\" timed out"),
                         HasSubstr("waiting for rank 1 ("), HasSubstr("): last seen in recv #1, "));
    const auto recv_waits = ::testing::AllOf(HasSubstr("recv #1 on group \"world\" timed out"),
                                             HasSubstr("tag 7: waiting for rank 0 ("),
                                             HasSubstr("): last seen in all_reduce #2, "));
    EXPECT_THAT(collective, AnyOf(reduce_waits, recv_waits));
    EXPECT_THAT(message, AnyOf(reduce_waits, recv_waits));
    EXPECT_TRUE(collective.starts_with("kTimeout: ") || message.starts_with("kTimeout: "));
  }
}

TEST(CommunicatorFailure, AnAbortEndsEveryWaitAndTellsTheReason) {
  const auto result = run_group(3, kFailureBudget, [](RankContext& context, Communicator& group) {
    if (context.rank == 0) {
      group.abort("the loss is not a number");
      group.abort("a second reason is not heard");
    }
    group.barrier();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, StartsWith("kAborted: "));
    EXPECT_THAT(rank.output, HasSubstr("abort() was called: the loss is not a number"));
  }
}

TEST(CommunicatorFailure, LaterCallsAndDroppedWorksThrowTheFirstFailure) {
  const auto result = run_group(2, kFailureBudget, [](RankContext& context, Communicator& group) {
    std::vector<float> data(8, 1);
    const Bytes bytes = std::as_writable_bytes(std::span(data));
    if (context.rank == 0) group.abort("over");
    { const Work dropped = group.all_reduce_async(bytes, bytes, DType::kFloat32, ReduceOp::kSum); }
    const std::string first = testing::failure_of([&] { group.barrier(); });
    const std::string second = testing::failure_of([&] { group.barrier(); });
    require(!first.empty() && first == second, "the same failure each time");
    Work work = group.barrier_async();
    require(testing::failure_of([&] { work.wait(); }) == first, "also from a work");
    require(work.error().has_value(), "and as a value");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
}

TEST(CommunicatorFailure, WrongArgumentsAreRefusedWithValuesAndDoNotHurtTheGroup) {
  const auto result = run_group(2, kFailureBudget, [](RankContext& context, Communicator& group) {
    std::vector<std::byte> data(10);
    const std::string where = format("broadcast on group \"world\", rank {}: ", context.rank);
    const auto refusal = [&](const std::function<void()>& call) {
      return testing::failure_of(call);
    };
    require(refusal([&] { group.broadcast(data, DType::kFloat32, 0); }) ==
                "kInvalidArgument: " + where +
                    "10 bytes are not a whole number of float32 elements of 4 bytes",
            "whole elements");
    require(refusal([&] { group.broadcast(data, DType::kUint8, 2); }) ==
                "kInvalidArgument: " + where + "root 2 is not in the group of 2 ranks",
            "root");
    require(!refusal([&] { group.all_gather(data, data, DType::kUint8); }).empty(), "sizes");
    require(!refusal([&] { group.all_reduce(data, data, DType::kUint8, ReduceOp::kAvg); }).empty(),
            "avg of integers");
    group.barrier();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
}

TEST(CommunicatorFailure, AClosedGroupRefusesAndClosingTwiceIsNothing) {
  const auto result = run_group(2, kFailureBudget, [](RankContext& context, Communicator& group) {
    group.barrier();
    group.close(context.system.deadline_in(kFailureBudget));
    group.close(context.system.deadline_in(kFailureBudget));
    const std::string where = format(
        " on group \"world\", rank {}: the group is closed; connect a new one", context.rank);
    const std::string of_collective = testing::failure_of([&] { group.barrier(); });
    require(of_collective == "kInvalidArgument: barrier" + where, of_collective);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
}

// Rank 1 destroys its group without close() while no operation is pending. The other rank must see
// this as a normal leave and not as a loss.
TEST(CommunicatorFailure, ADestructorPublishesALeave) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const testing::Resources before = testing::count_resources();
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const Membership membership{context.rank, 2, 1, store, "token"};
    auto group = Communicator::connect(context.system, membership, {},
                                       context.system.deadline_in(kFailureBudget));
    group->barrier();
    if (context.rank == 1) return;
    context.output = testing::failed_fields_of([&] { group->barrier(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              AnyOf("kPeerLost culprit=1 operation=barrier#2", "kPeerLost culprit=1"));
  EXPECT_EQ(testing::leftovers_since(before), "");
}

class ErrorLines final : public LogSink {
 public:
  void write(LogLevel level, std::string_view, std::string_view message) override {
    const std::lock_guard lock(mutex_);
    if (level == LogLevel::kError) lines_ += std::string(message) + "\n";
  }
  std::string lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::string lines_;
};

// Rank 0 destroys its group while an operation is pending. If an exception is the reason, that
// exception is the error to report.
TEST(CommunicatorFailure, UnwindingIsNotLoggedBeforeTheExceptionThatUnwinds) {
  const auto system = os::make_native_system();
  for (const bool throws : {true, false}) {
    const auto store = std::make_shared<HashStore>(*system);
    const auto log = std::make_shared<ErrorLines>();
    const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
      const Membership membership{context.rank, 2, 1, store, "token"};
      CommunicatorOptions options;
      if (context.rank == 0) options.log = log;
      context.output = testing::failure_of([&] {
        const auto group = Communicator::connect(context.system, membership, options,
                                                 context.system.deadline_in(kFailureBudget));
        std::byte data{};
        if (context.rank == 1) return group->recv(Bytes(&data, 1), DType::kUint8, 0, /*tag=*/1);
        const auto memory = std::make_shared<std::byte>();
        const Work pending = group->recv_async(Bytes(memory.get(), 1), DType::kUint8, 1,
                                               /*tag=*/1, {.keep_alive = memory});
        if (throws) throw Error(ErrorCode::kInvalidArgument, "the loss is not a number");
      });
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    const std::string& told = result.ranks[1].output;
    EXPECT_THAT(told, StartsWith("kAborted: "));
    if (throws) {
      EXPECT_EQ(log->lines(), "");
      EXPECT_THAT(told, HasSubstr("\n  an exception ended the group's scope while operations were "
                                  "pending: that exception is the first failure. Remedy: "));
    } else {
      EXPECT_THAT(log->lines(), HasSubstr("the group was destroyed while operations were pending; "
                                          "close() it first"));
      EXPECT_THAT(told, HasSubstr("close() it first. Remedy: "));
    }
  }
}

TEST(CommunicatorFailure, AFailedGroupIsRebuiltFromTheSameThreads) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const testing::Resources before = testing::count_resources();
  const auto result = testing::run_ranks_as_threads(3, [&](RankContext& context) {
    Membership membership{context.rank, 3, 1, store, "token"};
    auto group = Communicator::connect(context.system, membership, {},
                                       context.system.deadline_in(kFailureBudget));
    group->barrier();
    if (context.rank == 1) return group->close(context.system.deadline_in(kFailureBudget));
    require(!testing::failure_of([&] { group->barrier(); }).empty(), "rank 1 left");
    const std::vector<Rank> lost = group->lost_ranks();
    require(lost.size() == 1 && lost[0] == 1, "and is known to be gone");
    group->close(context.system.deadline_in(kFailureBudget));
    membership =
        rejoin(context.system, membership, lost, context.system.deadline_in(kFailureBudget))
            .value_or_throw();
    group = Communicator::connect(context.system, membership, {},
                                  context.system.deadline_in(kFailureBudget));
    std::vector<int64_t> data(5000, group->rank() + 1);
    const Bytes bytes = std::as_writable_bytes(std::span(data));
    group->all_reduce(bytes, bytes, DType::kInt64, ReduceOp::kSum);
    require(data.front() == 3 && data.back() == 3, "1 + 2");
    group->close(context.system.deadline_in(kFailureBudget));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(testing::leftovers_since(before), "");
}

// Rank 2 leaves, and rank 1 learns of it between two operations. Rank 1 closes the failed group at
// once, and rank 0 later. Both must regard rank 2, and no other rank, as lost, and must find each
// other again in rejoin(). A slow rank may learn of the leave during the first sum.
void lose_rank_2(os::System& system, const Membership& membership, TransportChoice transport) {
  const auto group = Communicator::connect(system, membership, {.transport = transport},
                                           system.deadline_in(kFailureBudget));
  const std::string failure = testing::failed_fields_of([&] {
    sum(*group, 10);
    if (membership.rank == 2) return group->close(system.deadline_in(kFailureBudget));
    if (membership.rank == 1) system.poll({}, system.deadline_in(milliseconds(5)));
    for (int step = 0; step < 2; ++step) sum(*group, 10);
  });
  if (membership.rank == 2) return require(failure.empty(), failure);
  require(failure.starts_with("kPeerLost culprit=2"), failure);
  if (membership.rank == 0) system.poll({}, system.deadline_in(milliseconds(20)));
  const std::vector<Rank> lost = group->lost_ranks();
  require(lost.size() == 1 && lost[0] == 2, format("{} ranks are lost", lost.size()));
  group->close(system.deadline_in(kFailureBudget));
  const Membership next =
      rejoin(system, membership, lost, system.deadline_in(kFailureBudget)).value_or_throw();
  require(next.world_size == 2, "two are left");
}

TEST(CommunicatorFailure, SurvivorsOfALeaverLoseNobodyElse) {
  const auto system = os::make_native_system();
  for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    for (int round = 0; round < 20; ++round) {
      const auto store = std::make_shared<HashStore>(*system);
      const auto result = testing::run_ranks_as_threads(3, [&](RankContext& context) {
        lose_rank_2(context.system, {context.rank, 3, 1, store, "token"}, transport);
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
}

// Runs sums until rank 2 has left. The error must name the operation that threw it, or no operation
// if it arrived between two sums.
void sum_until_rank_2_has_left(os::System& system, const Membership& membership,
                               TransportChoice transport) {
  const auto group = Communicator::connect(system, membership, {.transport = transport},
                                           system.deadline_in(kFailureBudget));
  int num_done = 0;
  const std::string failure = testing::failed_fields_of([&] {
    for (; num_done < (membership.rank == 2 ? 3 : 6); ++num_done) sum(*group, 10);
  });
  if (membership.rank == 2) return group->close(system.deadline_in(kFailureBudget));
  const std::string again = testing::failed_fields_of([&] { group->barrier(); });
  group->close(system.deadline_in(kFailureBudget));
  const std::string between = "kPeerLost culprit=2";
  const std::string inside = format("{} operation=all_reduce#{}", between, num_done + 1);
  require(failure == inside || failure == between,
          format("{} sums ended well, but: {}", num_done, failure));
  require(again == failure, "the next call throws the same");
}

TEST(CommunicatorFailure, AnOperationThatEndedWellIsNotBlamed) {
  int num_runs = 0;
  for (const uint64_t seed : testing::test_seeds(300)) {
    sim::Simulator simulator(seed, {.ranks_per_host = {3}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto transport = ++num_runs % 2 == 0 ? TransportChoice::kTcp : TransportChoice::kAuto;
    const auto result = simulator.run([&](os::System& system, int rank) {
      sum_until_rank_2_has_left(system, {rank, 3, 1, store, "token"}, transport);
    });
    EXPECT_EQ(result.failure, "") << "seed " << seed;
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
  }
}

// Ranks that close together must not wait until a time limit, because each gets an acknowledgement
// of its leave from every other rank.
TEST(CommunicatorFailure, RanksThatCloseTogetherWaitForNothingButEachOther) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    sim::Simulator simulator(seed, {.ranks_per_host = {2, 1}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      CommunicatorOptions options;
      options.listen_host = rank < 2 ? "10.0.0.1" : "10.0.0.2";
      const auto group = Communicator::connect(system, {rank, 3, 1, store, "token"}, options,
                                               system.deadline_in(seconds(20)));
      group->barrier();
      const TimePoint before = system.now();
      group->close(system.deadline_in(seconds(5)));
      testing::require(system.now() - before < milliseconds(500),
                       format("closing took {} ms", (system.now() - before).count() / 1'000'000));
    });
    EXPECT_EQ(result.failure, "") << "seed " << seed;
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
  }
}

TEST(CommunicatorFailure, SurvivorsOfASimulatedLeaverLoseNobodyElse) {
  for (const uint64_t seed : testing::test_seeds(50)) {
    sim::Simulator simulator(seed, {.ranks_per_host = {3}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      lose_rank_2(system, {rank, 3, 1, store, "token"}, TransportChoice::kAuto);
    });
    EXPECT_EQ(result.failure, "") << "seed " << seed;
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
  }
}

// A System that fails to open connections once `is_exhausted` is set.
class FewDescriptors final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override {
    if (!is_exhausted) return inner_.connect(address, deadline);
    return Error(ErrorCode::kUnavailable, "no descriptor").with_details({.is_own_limit = true});
  }
  std::atomic<bool> is_exhausted = false;
};

// Rank 0 has no file descriptor left for the data connection, which the first operation over TCP
// opens. The error must name rank 0, and must not report the peer as lost.
TEST(CommunicatorFailure, ARankWithoutADescriptorNamesItself) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  for (const bool is_message : {false, true}) {
    std::atomic<int> num_exhausted = 0;
    std::atomic<int> num_named = 0;
    const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
      FewDescriptors few(context.system);
      const Deadline soon = context.system.deadline_in(kFailureBudget);
      const Membership membership{context.rank, 2, is_message ? 1U : 2U, store, "token"};
      const auto group =
          Communicator::connect(few, membership, {.transport = TransportChoice::kTcp}, soon);
      few.is_exhausted = true;
      ++num_exhausted;
      while (num_exhausted < 2) context.system.yield();
      std::array<std::byte, 8> data{};
      try {
        if (!is_message) group->barrier({.deadline = soon});
        if (is_message && group->rank() == 0) group->send(data, DType::kUint8, 1, 0);
        if (is_message && group->rank() == 1) group->recv(data, DType::kUint8, 0, 0);
        require(is_message && group->rank() == 0, "it succeeded");
      } catch (const Error& error) {
        const bool is_first = error.code() == ErrorCode::kUnavailable;
        require(is_first || error.code() == ErrorCode::kAborted, error.message());
        require(!is_first || error.details().culprit == group->rank(), error.message());
        require(error.message().find("no descriptor") != std::string::npos, error.message());
        if (is_first) ++num_named;
      }
      group->close(soon);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_GE(num_named.load(), 1);
  }
}

}  // namespace
}  // namespace cadre
