// What a transport through shared memory says when there is no memory for its part.
#include "cadre/transport/shm/shm_transport.h"

#include <gtest/gtest.h>

#include <array>

#include "cadre/testing/scarce_memory.h"

namespace cadre {
namespace {

constexpr size_t kRingBytes = 1 << 16;

// Rank 0 of two, in memory of which `num_free` bytes can be reserved.
class ScarceTransport {
 public:
  explicit ScarceTransport(size_t num_free)
      : transport_(*system_, interrupt_, {.rank = 0, .world_size = 2},
                   std::make_shared<testing::ScarceMemory>(
                       system_->create_segment(ShmTransport::segment_bytes(2, kRingBytes))
                           .value_or_throw(),
                       num_free)) {}

  Result<size_t> send_a_byte() {
    const std::array<std::byte, 1> byte{};
    return transport_.channel(1).try_send(byte);
  }

 private:
  std::unique_ptr<os::System> system_ = os::make_native_system();
  os::Interrupt interrupt_{*system_};
  ShmTransport transport_;
};

TEST(ShmTransportReserveTest, NoMemoryForItsControlsIsRefusedAtOnce) {
  EXPECT_THROW(ScarceTransport(0), Error);
}

TEST(ShmTransportReserveTest, AFirstSendReservesTheRingThatItWrites) {
  constexpr size_t kForControls = 4096;
  const auto refused = ScarceTransport(kForControls).send_a_byte();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  ScarceTransport roomy(kForControls + kRingBytes);
  EXPECT_EQ(*roomy.send_a_byte(), 1u);
  EXPECT_EQ(*roomy.send_a_byte(), 1u);  // the ring is reserved once
}

}  // namespace
}  // namespace cadre
