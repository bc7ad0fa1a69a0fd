// Tests the pieces of peers: they are read, written and mapped side by side. Also tests signals
// between ranks, and the errors if no memory is shared.
#include "cadre/core/comm/symmetric/symmetric_heap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::require;

constexpr size_t kPieceBytes = 5000;  // this is no multiple of the page size
constexpr size_t kPaddedBytes = 8192;

void run_symmetric(int world_size, TransportChoice transport,
                   const std::function<void(RankContext&, Communicator&)>& body) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = testing::run_ranks_as_threads(world_size, [&](RankContext& context) {
    const Membership membership{context.rank, world_size, 1, store, "token"};
    CommunicatorOptions options;
    options.transport = transport;
    const auto group = Communicator::connect(context.system, membership, options,
                                             context.system.deadline_in(seconds(20)));
    body(context, *group);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Runs ranks, each of which allocates its piece of a buffer in shared memory.
void run_with_buffer(
    int world_size,
    const std::function<void(RankContext&, Communicator&, SymmetricBuffer&)>& body) {
  run_symmetric(world_size, TransportChoice::kSharedMemory,
                [&](RankContext& context, Communicator& group) {
                  body(context, group, *group.allocate_symmetric(kPieceBytes));
                });
}

Deadline soon(RankContext& context) {
  return context.system.deadline_in(seconds(20));
}

void require_in(const std::string& text, std::string_view part) {
  require(text.find(part) != std::string::npos, text);
}

TEST(SymmetricBufferTest, PeersAreReadWrittenAndSeenSideBySide) {
  const testing::Resources before = testing::count_resources();
  run_with_buffer(3, [](RankContext& context, Communicator& group, SymmetricBuffer& buffer) {
    require(buffer.shares_memory(), "it shares memory");
    const int me = context.rank;
    const int next = (me + 1) % 3;
    std::ranges::fill(buffer.local(), static_cast<std::byte>(10 + me));
    group.barrier();
    for (int rank = 0; rank < 3; ++rank) {
      const auto piece = buffer.peer(rank);
      require(piece.size() == kPieceBytes, "its size");
      require(piece[kPieceBytes - 1] == static_cast<std::byte>(10 + rank), "its last byte");
    }
    require(buffer.peer(me).data() == buffer.local().data(), "its own piece");
    group.barrier();
    buffer.writable_peer(next)[7] = static_cast<std::byte>(100 + me);
    group.barrier();
    const Bytes all = buffer.contiguous();
    require(all.data() == buffer.contiguous().data(), "it is mapped once");
    require(all.size() == 3 * kPaddedBytes, "the size of the view");
    for (size_t rank = 0; rank < 3; ++rank) {
      const auto value = static_cast<std::byte>(100 + (rank + 2) % 3);
      require(all[rank * kPaddedBytes + 7] == value, "what its predecessor wrote");
      require(all[rank * kPaddedBytes + 8] == static_cast<std::byte>(10 + rank), "its own");
      require(all[rank * kPaddedBytes + kPieceBytes] == std::byte{0}, "the padding");
    }
    group.barrier();
    group.close(soon(context));
    require(all[7] == std::byte{102}, "the view stays");
  });
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(SymmetricBufferTest, SignalsAreCountedByRankAndSlot) {
  run_with_buffer(2, [](RankContext& context, Communicator& group, SymmetricBuffer& buffer) {
    const int me = context.rank;
    const int peer = 1 - me;
    constexpr uint32_t kLast = SymmetricBuffer::kNumSignals - 1;
    for (int i = 0; i < 200; ++i) {
      if (me == 0) {
        buffer.writable_peer(1)[0] = static_cast<std::byte>(i);
        buffer.signal(1, kLast);
        buffer.wait_signal(1, 0, soon(context));
      } else {
        buffer.wait_signal(0, kLast, soon(context));
        require(buffer.local()[0] == static_cast<std::byte>(i), "what came before the signal");
        buffer.signal(0, 0);
      }
    }
    buffer.signal(peer, 5);
    buffer.signal(peer, 5);
    buffer.wait_signal(peer, 5, soon(context));
    buffer.wait_signal(peer, 5, soon(context));
    buffer.signal(me, 6);
    buffer.wait_signal(me, 6, soon(context));
    group.close(soon(context));
  });
}

TEST(SymmetricBufferTest, AMissingSignalIsAFailureThatNamesTheRank) {
  run_with_buffer(3, [](RankContext& context, Communicator& group, SymmetricBuffer& buffer) {
    if (context.rank == 0) {
      // The wait does not end by a signal of another rank or in another slot.
      buffer.wait_signal(1, 3, soon(context));
      const auto deadline = context.system.deadline_in(milliseconds(50));
      const std::string failure = failure_of([&] { buffer.wait_signal(2, 3, deadline); });
      require_in(failure, "kTimeout: wait_signal #2 on group \"world\" timed out after ");
      require_in(failure, "signal slot 3: ");
      require_in(failure, "waiting for rank 2 (");
      require_in(failure, "check that the other rank signals this slot");
      const FlightRecord record = group.flight_record();
      const FlightEntry& last = record.entries.back();
      require(last.state == wire::ActivityState::kFailed && last.peer == 2, "it is recorded");
      require(last.number == 2, "its number");
      return;
    }
    if (context.rank == 1) buffer.signal(0, 3);
    if (context.rank == 2) buffer.signal(0, 2);
    const std::string failure = failure_of([&] { buffer.wait_signal(0, 9, soon(context)); });
    require_in(failure, "rank 0");
  });
}

TEST(SymmetricBufferTest, AnAbortEndsAWait) {
  run_with_buffer(2, [](RankContext& context, Communicator& group, SymmetricBuffer& buffer) {
    if (context.rank == 1) {
      group.abort("enough");
      return;
    }
    const Deadline deadline = soon(context);
    const std::string failure = failure_of([&] { buffer.wait_signal(1, 0, deadline); });
    require(!deadline.has_passed(context.system.now()), "it waited until its deadline");
    require_in(failure, "kAborted");
    require_in(failure, "enough");
  });
}

// A rank whose operation has failed revokes its memory: the pages become private to it. A signal
// must then fail too, because it would make peers read stale bytes.
TEST(SymmetricBufferTest, MemoryThatWasTakenBackIsRefusedByBothSides) {
  run_with_buffer(3, [](RankContext& context, Communicator& group, SymmetricBuffer& buffer) {
    HostMemory& memory = *CommunicatorParts::impl_of(group).fabric->host_memory();
    buffer.signal(0, 4);
    group.barrier();
    if (context.rank == 1) {
      const Place place = memory.find(buffer.local()).value_or_throw();
      memory.revoke(place, kPieceBytes, "a test").value_or_throw();
    }
    group.barrier();
    const std::string refusal = ": rank 1 took this symmetric memory back from its peers";
    require_in(failure_of([&] { buffer.peer(1); }), "kAborted: peer" + refusal);
    require_in(failure_of([&] { buffer.contiguous(); }), "kAborted: contiguous" + refusal);
    require_in(failure_of([&] { buffer.signal(1, 0); }), "kAborted: signal" + refusal);
    if (context.rank == 0) {
      const std::string failure = failure_of([&] { buffer.wait_signal(1, 4, soon(context)); });
      require_in(failure, "kAborted: wait_signal" + refusal);
      require(buffer.peer(2).size() == kPieceBytes, "the pieces of other ranks stay readable");
    }
    if (context.rank == 1) {
      require_in(failure_of([&] { buffer.signal(0, 0); }), "kAborted: signal" + refusal);
      require(buffer.local().size() == kPieceBytes, "its own bytes are left to it");
    }
    group.close(soon(context));
  });
}

// The size is so large that it wraps around when it is rounded up. A negative number that is passed
// as a size is such a number.
TEST(SymmetricBufferTest, ASizeThatNoMachineHasIsRefused) {
  for (const auto transport : {TransportChoice::kSharedMemory, TransportChoice::kTcp}) {
    run_symmetric(2, transport, [](RankContext& context, Communicator& group) {
      const std::string failure =
          failure_of([&] { group.allocate_symmetric(static_cast<size_t>(-1)); });
      require_in(failure,
                 format("kInvalidArgument: allocate_symmetric on group \"world\", rank {}: "
                        "the size is 18446744073709551615 bytes",
                        context.rank));
      group.barrier();
      group.close(soon(context));
    });
  }
}

TEST(SymmetricBufferTest, AClosedGroupRefusesToWait) {
  run_symmetric(1, TransportChoice::kAuto, [](RankContext& context, Communicator& group) {
    const auto buffer = group.allocate_symmetric(kPieceBytes);
    group.close(soon(context));
    buffer->signal(0, 0);
    const std::string failure = failure_of([&] { buffer->wait_signal(0, 0, soon(context)); });
    require_in(failure, "group \"world\", rank 0: the group is closed; connect a new one");
  });
}

void check_own_piece(RankContext& context, Communicator& group) {
  const auto buffer = group.allocate_symmetric(kPieceBytes);
  const int me = context.rank;
  require(!buffer->shares_memory(), "it shares memory");
  buffer->local()[3] = std::byte{9};
  require(buffer->peer(me)[3] == std::byte{9}, "its own piece");
  buffer->signal(me, 1);
  buffer->wait_signal(me, 1, soon(context));
  require_in(failure_of([&] { buffer->contiguous(); }), "share no memory");
  const std::string slot = failure_of([&] { buffer->signal(me, 64); });
  require_in(slot, "kInvalidArgument: signal: signal slot 64 of 64; expected 0 to 63");
  if (context.world_size > 1) {
    const std::string peer = failure_of([&] { buffer->peer(1 - me); });
    require_in(peer, "kInvalidArgument: peer: the ranks of this group share no memory");
    require_in(failure_of([&] { buffer->signal(1 - me, 0); }), "share no memory");
    require_in(failure_of([&] { buffer->wait_signal(1 - me, 0, soon(context)); }),
               "share no memory");
  }
  require_in(failure_of([&] { buffer->peer(context.world_size); }), "kInvalidArgument");
  group.close(soon(context));
}

TEST(SymmetricBufferTest, WithoutSharedMemoryARankReachesItsOwnPieceAlone) {
  run_symmetric(2, TransportChoice::kTcp, check_own_piece);
  run_symmetric(1, TransportChoice::kAuto, check_own_piece);
}

}  // namespace
}  // namespace cadre
