#include "cadre/core/transport/shm/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cadre/core/base/random.h"

namespace cadre {
namespace {

constexpr size_t kCapacity = 4096;

class RingTest : public ::testing::Test {
 protected:
  RingControl control_;
  // The ring is the middle third. Guard bytes on both sides show any write outside of it.
  std::vector<std::byte> memory_ = std::vector<std::byte>(3 * kCapacity, std::byte{0xee});
  Bytes data_ = Bytes(memory_).subspan(kCapacity, kCapacity);
  RingWriter writer_{control_, data_};
  RingReader reader_{control_, data_};
};

TEST_F(RingTest, WritesAndReadsOfAnySizeKeepTheOrder) {
  constexpr uint64_t kSeed = 4;
  Random random(kSeed);
  uint8_t next_written = 0;
  uint8_t next_read = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> source(random.below(2 * kCapacity));
    for (size_t i = 0; i < source.size(); ++i) {
      source[i] = static_cast<std::byte>(static_cast<uint8_t>(next_written + i));
    }
    next_written = static_cast<uint8_t>(next_written + *writer_.try_write(source));
    std::vector<std::byte> target(random.below(2 * kCapacity));
    target.resize(*reader_.try_read(target));
    for (const std::byte byte : target) {
      ASSERT_EQ(byte, static_cast<std::byte>(next_read)) << "seed " << kSeed << " round " << round;
      ++next_read;
    }
  }
  const auto is_guard = [](std::byte byte) { return byte == std::byte{0xee}; };
  EXPECT_TRUE(std::all_of(memory_.begin(), memory_.begin() + kCapacity, is_guard));
  EXPECT_TRUE(std::all_of(memory_.end() - kCapacity, memory_.end(), is_guard));
}

// The expected bytes were written by hand from docs/formats/shared-memory.md.
TEST_F(RingTest, ControlHasTheDocumentedBytes) {
  std::array<std::byte, 128> golden{};
  golden[0] = std::byte{0x05};   // the writer has written 5 bytes
  golden[8] = std::byte{1};      // the writer has closed its end
  golden[64] = std::byte{0x03};  // the reader has read 3 bytes
  // A new segment contains only zeros.
  alignas(RingControl) std::array<std::byte, 128> memory{};
  auto& shared = *reinterpret_cast<RingControl*>(memory.data());
  RingWriter writer(shared, data_);
  RingReader reader(shared, data_);
  std::array<std::byte, 5> bytes{};
  ASSERT_EQ(*writer.try_write(bytes), 5u);
  ASSERT_EQ(*reader.try_read(Bytes(bytes).first(3)), 3u);
  writer.close();
  EXPECT_EQ(memory, golden);
  alignas(RingControl) std::array<std::byte, 128> copied = golden;
  const auto& control = *reinterpret_cast<const RingControl*>(copied.data());
  EXPECT_EQ(control.writer.count, 5u);
  EXPECT_EQ(control.writer.is_closed, 1u);
  EXPECT_EQ(control.reader.count, 3u);
  EXPECT_EQ(control.reader.is_closed, 0u);
}

TEST_F(RingTest, HoldsExactlyItsCapacity) {
  const std::vector<std::byte> source(kCapacity + 1);
  EXPECT_EQ(*writer_.try_write(source), kCapacity);
  EXPECT_FALSE(writer_.is_ready());
  EXPECT_EQ(*writer_.try_write(source), 0u);
  std::array<std::byte, 1> target;
  EXPECT_EQ(*reader_.try_read(target), 1u);
  EXPECT_TRUE(writer_.is_ready());
}

TEST_F(RingTest, AnImpossibleCountOfTheReaderIsCorruption) {
  const std::vector<std::byte> source(16);
  ASSERT_EQ(*writer_.try_write(source), 16u);
  for (const uint64_t lie : {uint64_t{17}, ~uint64_t{0}, uint64_t{1} << 63}) {
    control_.reader.count = lie;  // more bytes than were ever written
    EXPECT_TRUE(writer_.is_ready());
    const auto written = writer_.try_write(source);
    ASSERT_FALSE(written.ok());
    EXPECT_EQ(written.error().code(), ErrorCode::kCorruption);
  }
}

TEST_F(RingTest, AnImpossibleCountOfTheWriterIsCorruption) {
  std::vector<std::byte> target(2 * kCapacity);
  for (const uint64_t lie : {uint64_t{kCapacity + 1}, ~uint64_t{0}}) {
    control_.writer.count = lie;
    EXPECT_TRUE(reader_.is_ready());
    const auto read = reader_.try_read(target);
    ASSERT_FALSE(read.ok());
    EXPECT_EQ(read.error().code(), ErrorCode::kCorruption);
  }
}

TEST_F(RingTest, WhatWasWrittenBeforeTheCloseIsStillRead) {
  const std::vector<std::byte> source(10);
  ASSERT_EQ(*writer_.try_write(source), 10u);
  writer_.close();
  std::vector<std::byte> target(20);
  EXPECT_EQ(*reader_.try_read(target), 10u);
  EXPECT_EQ(reader_.try_read(target).error().code(), ErrorCode::kPeerLost);
  reader_.close();
  EXPECT_EQ(writer_.try_write(source).error().code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace cadre
