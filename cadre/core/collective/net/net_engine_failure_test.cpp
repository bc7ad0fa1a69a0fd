// Tests failures of the net engine: different calls, silent peers, closed channels, interrupts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

class NetEngineFailureTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

INSTANTIATE_TEST_SUITE_P(All, NetEngineFailureTest,
                         ::testing::Values(TransportKind::kTcp, TransportKind::kShm),
                         [](const auto& test) { return std::string(to_string(test.param)); });

void require_mismatch(const Status& status, const OpProgress& progress, int peer, OpKind theirs) {
  require(!status.ok(), "it succeeded");
  require(status.error().code() == ErrorCode::kInvalidArgument, status.error().message());
  require(progress.mismatch_peer == peer, format("peer {} is named", progress.mismatch_peer));
  const auto other = OpDescriptor::from_fingerprint(progress.mismatch_fingerprint);
  require(other.kind == theirs, format("it called {}", other.to_string()));
}

TEST_P(NetEngineFailureTest, TwoOperationsThatDifferAreNamedOnBothSides) {
  const TransportGroup group(*system_, GetParam(), 2);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    std::array<std::byte, 64> data{};
    engine.barrier().value_or_throw();
    if (transport.rank() == 0) {
      const auto status = engine.all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
      require_mismatch(status, engine.progress(), 1, OpKind::kBarrier);
      require(engine.progress().mismatch_number == 2, "the wrong number");
    } else {
      require_mismatch(engine.barrier(), engine.progress(), 0, OpKind::kAllReduce);
    }
  });
  EXPECT_EQ(failures, "");
}

// Both ranks pass three collectives in one call, and the second one of rank 1 differs from that of
// rank 0. The first collective must complete, and the third one must not run.
TEST_P(NetEngineFailureTest, ACallOfSeveralCollectivesEndsAtTheFirstThatDiffers) {
  const TransportGroup group(*system_, GetParam(), 2);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    std::vector<float> values(3, 1.0F);
    std::vector<Collective> call;
    for (float& value : values) {
      const Bytes data = std::as_writable_bytes(std::span(&value, 1));
      call.push_back(Collective::all_reduce(data, data, DType::kFloat32, ReduceOp::kSum));
    }
    engine.submit(call).value_or_throw();
    require(values == std::vector<float>(3, 2.0F), "a sum is wrong");
    if (transport.rank() == 1) call[1].reduction = ReduceOp::kMax;
    require_mismatch(engine.submit(call), engine.progress(), 1 - transport.rank(),
                     OpKind::kAllReduce);
    require(engine.progress().index() == 1, "another collective of the call is at fault");
    require(engine.progress().mismatch_number == 5, "the wrong number");
    require(values[0] == 4.0F && values[2] == 2.0F, "the others were not left as they were");
  });
  EXPECT_EQ(failures, "");
}

// Gathers `size` bytes and runs a barrier. Rank 3 names itself as the root of the gather, and the
// other ranks name rank 0. Ranks 0 and 3 do not receive from each other, and most of the others
// have completed the gather. They detect the mismatch when they wait in the barrier.
Status gather_to_two_roots(EngineRank& engine, Rank rank, size_t size, int world_size) {
  CADRE_RETURN_IF_ERROR(engine.barrier());
  const std::vector<std::byte> part(size);
  std::vector<std::byte> whole(size * static_cast<size_t>(world_size));
  const bool is_odd = rank == 3;
  const auto status = engine.gather(part, whole, is_odd ? 3 : 0);
  require(!status.ok() || (rank != 0 && !is_odd), "a root has succeeded");
  return status.ok() ? engine.barrier() : status;
}

TEST_P(NetEngineFailureTest, TwoRootsThatAreFarApartAreFoundByTheOthers) {
  constexpr int kRanks = 8;
  const TransportGroup group(*system_, GetParam(), kRanks);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    const auto status = gather_to_two_roots(engine, transport.rank(), 8, kRanks);
    require(!status.ok(), "the barrier has succeeded");
    require(status.error().code() != ErrorCode::kTimeout, status.error().message());
  });
  EXPECT_EQ(failures, "");
}

// A receiver that waits for the rest of a long message does not see the refusal behind it. In a
// Communicator the control plane reports the failure. Here a rank that fails interrupts the others,
// and at least one rank must notice the mismatch.
TEST_P(NetEngineFailureTest, TwoRootsOfLongMessagesAreFoundByOneRankAtLeast) {
  constexpr int kRanks = 8;
  const TransportGroup group(*system_, GetParam(), kRanks);
  std::atomic<int> num_found = 0;
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    const auto status = gather_to_two_roots(engine, transport.rank(), 200'000, kRanks);
    require(!status.ok(), "the barrier has succeeded");
    require(status.error().code() != ErrorCode::kTimeout, status.error().message());
    if (status.error().code() == ErrorCode::kInvalidArgument) ++num_found;
    for (int peer = 0; peer < kRanks; ++peer) group.interrupt_of(peer).raise();
  });
  EXPECT_EQ(failures, "");
  EXPECT_GE(num_found.load(), 1);
}

// Rank 1 is already in its second operation when a refusal of the first one arrives. It must
// forward the refusal with the number of the first operation. Otherwise rank 2, which may still run
// the first operation, would ignore it.
TEST_P(NetEngineFailureTest, ARefusalIsPassedOnUnderItsOwnNumber) {
  const TransportGroup group(*system_, GetParam(), 3);
  EngineRank engine(*system_, group.of(1));
  std::array<std::byte, 8> data{};
  engine.broadcast(data, 1).value_or_throw();  // the root waits for no other rank
  const OpDescriptor first{.kind = OpKind::kBroadcast, .root = 1, .count = data.size()};
  Link::refuse(
      group.of(0).channel(1),
      {.algorithm = Algorithm::kBinomialTree, .number = 1, .fingerprint = first.fingerprint()});
  const auto status = engine.barrier();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kAborted) << status.error().message();

  // The payload of the broadcast and the header of the barrier arrive first.
  const auto deadline = system_->deadline_in(std::chrono::seconds(20));
  std::vector<std::byte> arrived;
  std::optional<OperationHeader> last;
  while (!last || last->kind != OperationHeader::Kind::kRefusal) {
    const std::array interests = {ChannelInterest{.peer = Rank(1), .want_recv = true}};
    ASSERT_TRUE(group.of(2).wait(interests, deadline).ok());
    std::array<std::byte, 512> piece{};
    const size_t size = group.of(2).channel(1).try_recv(piece).value_or_throw();
    arrived.insert(arrived.end(), piece.begin(), piece.begin() + static_cast<ptrdiff_t>(size));
    if (arrived.size() < OperationHeader::kBytes) continue;
    const auto header = OperationHeader::parse(ConstBytes(arrived).last(OperationHeader::kBytes));
    if (header.ok()) last = *header;
  }
  EXPECT_EQ(last->number, 1u);
}

// The peer already waits in the next operation, and has announced it, when it learns that the
// earlier operation has failed and sends its refusal. The earlier announcement must not hide the
// refusal.
TEST_P(NetEngineFailureTest, AnAnnouncementHidesNoRefusal) {
  const TransportGroup group(*system_, GetParam(), 2);
  const OpDescriptor barrier{.kind = OpKind::kBarrier};
  const OperationHeader first{
      .algorithm = Algorithm::kDissemination, .number = 1, .fingerprint = barrier.fingerprint()};
  OperationHeader second = first;
  second.number = 2;
  const CallHistory history;
  Link theirs(group.of(0).channel(1), history);
  theirs.begin_operation();
  theirs.announce(second);
  while (!theirs.is_send_done()) theirs.advance_send().value_or_throw();
  theirs.refuse(first);

  EngineRank engine(*system_, group.of(1));
  const auto status = engine.barrier();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kAborted) << status.error().message();
}

TEST_P(NetEngineFailureTest, ADifferentCountIsAnotherOperation) {
  const TransportGroup group(*system_, GetParam(), 2);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    // The data is so long that neither side can send all of it unless the other side receives.
    std::vector<std::byte> data((4 << 20) + 4 * static_cast<size_t>(transport.rank()));
    const auto status = engine.all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
    require_mismatch(status, engine.progress(), 1 - transport.rank(), OpKind::kAllReduce);
  });
  EXPECT_EQ(failures, "");
}

// The root of a broadcast receives from no rank, and rank 2 waits only for rank 1. The rank that
// first notices the mismatch sends refusals, so the ranks that an error names depend on timing. But
// no rank waits until its deadline.
TEST_P(NetEngineFailureTest, ARankThatExpectsNothingFromTheOddOneIsToldToo) {
  const TransportGroup group(*system_, GetParam(), 3);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    std::vector<std::byte> data(64 << 20);  // more than the channels hold
    if (transport.rank() == 1) {
      const auto status = engine.barrier();
      require_mismatch(status, engine.progress(), engine.progress().mismatch_peer,
                       OpKind::kBroadcast);
      return;
    }
    const auto status = engine.broadcast(data, 0);
    require(!status.ok(), "it succeeded");
    if (status.error().code() == ErrorCode::kAborted)
      return;  // the other rank of the broadcast refused the operation
    require_mismatch(status, engine.progress(), 1, OpKind::kBarrier);
  });
  EXPECT_EQ(failures, "");
}

// Rank 3 waits long for rank 2. Meanwhile rank 1 has finished the operation and sends the next
// broadcast to rank 3. This must not count as a mismatch.
TEST_P(NetEngineFailureTest, APeerThatIsAheadIsNoMismatch) {
  const TransportGroup group(*system_, GetParam(), 4);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    std::array<std::byte, 8> first{};
    std::array<std::byte, 8> second{};
    if (transport.rank() == 0) first.fill(std::byte{1});
    if (transport.rank() == 1) second.fill(std::byte{2});
    if (transport.rank() == 2) {
      system_->make_waiter()->park(system_->deadline_in(milliseconds(50)));
    }
    engine.broadcast(first, 0).value_or_throw();
    engine.broadcast(second, 1).value_or_throw();
    require(first[7] == std::byte{1} && second[7] == std::byte{2}, "wrong data");
  });
  EXPECT_EQ(failures, "");
}

TEST_P(NetEngineFailureTest, TheDeadlineNamesTheSilentPeer) {
  const TransportGroup group(*system_, GetParam(), 2);
  EngineRank engine(*system_, group.of(0));
  engine.set_patience(milliseconds(30));
  const auto status = engine.barrier();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
  EXPECT_EQ(engine.progress().waiting_for(), 1);
  EXPECT_STREQ(engine.progress().phase(), "meet");
}

TEST_P(NetEngineFailureTest, AnInterruptEndsTheWait) {
  const TransportGroup group(*system_, GetParam(), 2);
  EngineRank engine(*system_, group.of(0));
  const auto thread = system_->spawn("interrupter", [&] {
    const auto waiter = system_->make_waiter();
    waiter->park(system_->deadline_in(milliseconds(20)));
    group.interrupt_of(0).raise();
  });
  const auto status = engine.barrier();
  thread->join();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kAborted);
}

TEST_P(NetEngineFailureTest, APeerThatIsGoneIsNamed) {
  TransportGroup group(*system_, GetParam(), 2);
  group.close(1);
  EngineRank engine(*system_, group.of(0));
  std::array<std::byte, 8> data{};
  const auto status = engine.broadcast(data, 1);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(engine.progress().waiting_for(), 1);
}

}  // namespace
}  // namespace cadre
