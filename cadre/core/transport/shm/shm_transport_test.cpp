// Tests the rings of a shared-memory transport: the first send makes a ring, closing both ends
// releases it, and an error says why a ring cannot be made.
#include "cadre/core/transport/shm/shm_transport.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cadre/testing/core/host_memories.h"

namespace cadre {
namespace {

constexpr size_t kSmallestRing = 4096;
constexpr size_t kSliceBytes = 1 << 20;
// The bytes that a rank's page and a ring take in the slice. Each allocation has a header of one
// page.
constexpr size_t kForPage = 2 * 4096;
constexpr size_t kForRing = 4096 + 2 * 4096;

// The transports of two ranks, each of which can allocate `num_free` bytes.
class TwoTransports {
 public:
  explicit TwoTransports(size_t num_free = 1 << 20)
      : memories_(testing::make_host_memories(
            *system_, {.num_slots = 2, .slice_bytes = kSliceBytes}, {num_free, num_free})) {
    std::array<Piece, 2> pages;
    std::vector<Place> places;
    for (size_t rank = 0; rank < 2; ++rank) {
      pages[rank] = ShmTransport::cut_page(*memories_[rank], slots_).value_or_throw();
      places.push_back(pages[rank].place());
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      setups_[rank] = {memories_[rank], static_cast<int>(rank), true, kSmallestRing, slots_,
                       places,          std::move(pages[rank])};
    }
  }

  ShmTransportSetup& setup(size_t rank) { return setups_[rank]; }
  void start(size_t rank) {
    transports_[rank] =
        std::make_unique<ShmTransport>(*system_, interrupt_, std::move(setups_[rank]));
  }
  void stop(size_t rank) { transports_[rank].reset(); }
  Channel& channel(size_t rank) { return transports_[rank]->channel(static_cast<int>(1 - rank)); }
  Result<size_t> send_a_byte(size_t rank) {
    const std::array<std::byte, 1> byte{};
    return channel(rank).try_send(byte);
  }
  Result<size_t> receive(size_t rank) {
    std::array<std::byte, 16> bytes;
    return channel(rank).try_recv(bytes);
  }
  // Makes the rank regard the other one as lost.
  void forget_peer_of(size_t rank) { memories_[rank]->forget_holder(static_cast<int>(1 - rank)); }
  // Returns the offset in the rank's slice at which the rank would allocate its next piece.
  size_t first_free(size_t rank) {
    return memories_[rank]->allocate({.num_bytes = 1}).value_or_throw().place().offset;
  }

 private:
  std::unique_ptr<os::System> system_ = os::make_native_system();
  os::Interrupt interrupt_;
  std::vector<int> slots_ = {0, 1};
  std::vector<std::shared_ptr<HostMemory>> memories_;
  std::array<ShmTransportSetup, 2> setups_;
  std::array<std::unique_ptr<ShmTransport>, 2> transports_;
};

TEST(ShmTransportRingTest, TheDefaultSizeOfARingFallsWithTheNumberOfRanks) {
  EXPECT_EQ(ShmTransport::default_ring_bytes(2), size_t{512 << 10});
  EXPECT_EQ(ShmTransport::default_ring_bytes(16), size_t{512 << 10});
  EXPECT_EQ(ShmTransport::default_ring_bytes(17), size_t{256 << 10});
  EXPECT_EQ(ShmTransport::default_ring_bytes(64), size_t{128 << 10});
  EXPECT_EQ(ShmTransport::default_ring_bytes(HostMemory::kMaxSlots), size_t{64 << 10});
}

TEST(ShmTransportRingTest, ARingHasTheDefaultSizeForItsRanks) {
  TwoTransports two;
  two.setup(0).ring_bytes = 0;
  two.start(0);
  const std::vector<std::byte> bytes(1 << 20);
  EXPECT_EQ(*two.channel(0).try_send(bytes), size_t{512 << 10});
}

TEST(ShmTransportRingTest, NoMemoryForItsPageIsRefusedAtOnce) {
  EXPECT_THROW(TwoTransports(kForPage - 1), Error);
}

TEST(ShmTransportRingTest, AFirstSendMakesTheRingThatItWrites) {
  TwoTransports poor(kForPage + kForRing - 1);
  poor.start(0);
  const auto refused = poor.send_a_byte(0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  TwoTransports two(kForPage + kForRing);
  two.start(0);
  EXPECT_EQ(*two.channel(0).try_send({}), 0u);
  EXPECT_EQ(*two.send_a_byte(0), 1u);
  EXPECT_EQ(*two.send_a_byte(0), 1u);  // this byte is written to the ring of the first send
  two.start(1);
  EXPECT_EQ(*two.receive(1), 2u);
  EXPECT_EQ(*two.receive(0), 0u) << "bytes came, but there is no ring from rank 1 to rank 0";
}

// If the writer closes first, the memory of the ring must not be released before the reader has
// closed, too.
TEST(ShmTransportRingTest, ARingIsGivenBackWhenBothEndsHaveGone) {
  TwoTransports two;
  two.start(0);
  two.start(1);
  ASSERT_EQ(*two.send_a_byte(0), 1u);
  EXPECT_EQ(two.first_free(0), size_t{3 * 4096});
  two.stop(0);
  EXPECT_EQ(two.first_free(0), size_t{3 * 4096});
  EXPECT_EQ(*two.receive(1), 1u);
  EXPECT_EQ(two.receive(1).error().code(), ErrorCode::kPeerLost);
  two.stop(1);
  EXPECT_EQ(two.first_free(0), 0u);
  EXPECT_EQ(two.first_free(1), 0u);
}

// Rank 0 regards rank 1 as lost and may reuse the memory of its rings to rank 1. Rank 1, which is
// still alive, must get an error instead of bytes of the reused memory.
TEST(ShmTransportRingTest, ARankThatItsPeerTakesForLostGetsNoBytes) {
  TwoTransports two;
  two.start(0);
  two.start(1);
  ASSERT_EQ(*two.send_a_byte(0), 1u);
  two.forget_peer_of(0);
  EXPECT_EQ(two.receive(1).error().code(), ErrorCode::kAborted);
}

// If a ring were made for a rank that has left, no rank would release it.
TEST(ShmTransportRingTest, ARankThatHasLeftGetsNoRing) {
  TwoTransports two;
  two.start(0);
  two.start(1);
  two.stop(1);
  EXPECT_EQ(two.send_a_byte(0).error().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(two.receive(0).error().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(two.first_free(0), 4096u);
  two.stop(0);
  EXPECT_EQ(two.first_free(0), 0u);
}

TEST(ShmTransportRingTest, ARingThatItsReaderNeverSawIsGivenBack) {
  TwoTransports two;
  two.start(0);
  two.start(1);
  ASSERT_EQ(*two.send_a_byte(0), 1u);
  two.stop(1);
  two.stop(0);
  EXPECT_EQ(two.first_free(0), 0u);
}

TEST(ShmTransportRingTest, PlacesOutsideOfASliceAreRefused) {
  TwoTransports outside;
  outside.setup(0).pages[1].offset = kSliceBytes;
  EXPECT_THROW(outside.start(0), Error);
  TwoTransports two;
  two.start(1);
  // The page of rank 0 has the doorbell, then a RingPlace for each rank. The test overwrites the
  // RingPlace of the ring to rank 1.
  std::byte* const page = two.setup(0).page.bytes().data();
  const Place wild{.piece = 1, .offset = kSliceBytes - 4096};
  std::memcpy(page + kCacheLine + sizeof(Place), &wild, sizeof(wild));
  EXPECT_EQ(two.receive(1).error().code(), ErrorCode::kCorruption);
}

}  // namespace
}  // namespace cadre
