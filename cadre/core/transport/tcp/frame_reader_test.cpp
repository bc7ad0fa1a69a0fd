// Tests reading frames that arrive in pieces, and how many bytes of the next frame are read.
#include "cadre/core/transport/tcp/frame_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cadre/testing/core/silent_socket.h"

namespace cadre {
namespace {

using wire::LinkFrame;

// A socket from which the reader receives the bytes that a test has fed to it.
class FedSocket final : public testing::SilentSocket {
 public:
  void feed(ConstBytes bytes) { pending_.insert(pending_.end(), bytes.begin(), bytes.end()); }
  size_t num_pending() const { return pending_.size(); }

  Result<size_t> try_recv(Bytes buffer) override {
    const size_t size = std::min(buffer.size(), pending_.size());
    if (size > 0) std::memcpy(buffer.data(), pending_.data(), size);
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(size));
    return size;
  }

 private:
  std::vector<std::byte> pending_;
};

LinkFrame data_of(uint32_t num_bytes) {
  return {LinkFrame::Kind::kData, 1, num_bytes, 7};
}

std::vector<std::byte> counting(size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

TEST(FrameReaderTest, AHeaderInTwoPiecesIsOneFrame) {
  FedSocket socket;
  FrameReader reader(socket);
  const auto header = LinkFrame{LinkFrame::Kind::kCredit, 2, 64, 9}.encode();
  socket.feed(ConstBytes(header).first(5));
  EXPECT_EQ(reader.read_ahead(0).value_or_throw(), 5U);
  EXPECT_EQ(reader.next().value_or_throw(), std::nullopt);
  socket.feed(ConstBytes(header).subspan(5));
  EXPECT_EQ(reader.read_ahead(0).value_or_throw(), LinkFrame::kBytes - 5);
  EXPECT_EQ(reader.next().value_or_throw(), (LinkFrame{LinkFrame::Kind::kCredit, 2, 64, 9}));
  EXPECT_EQ(reader.num_left(), 0U);
}

TEST(FrameReaderTest, NoMoreIsReadAheadThanTheReceiverExpects) {
  FedSocket socket;
  FrameReader reader(socket);
  const auto payload = counting(100);
  socket.feed(data_of(100).encode());
  socket.feed(payload);
  EXPECT_EQ(reader.read_ahead(10).value_or_throw(), LinkFrame::kBytes + 10);
  EXPECT_EQ(socket.num_pending(), 90U);
  ASSERT_EQ(reader.next().value_or_throw(), data_of(100));
  EXPECT_EQ(reader.num_left(), 100U);
  EXPECT_TRUE(reader.has_buffered());
  const ConstBytes taken = reader.take_buffered(4);
  EXPECT_TRUE(std::ranges::equal(taken, ConstBytes(payload).first(4)));
  EXPECT_EQ(reader.take_buffered(100).size(), 6U);
  EXPECT_FALSE(reader.has_buffered());
  EXPECT_EQ(reader.num_left(), 90U);
}

TEST(FrameReaderTest, TheNextHeaderIsReadWithTheEndOfAFrame) {
  FedSocket socket;
  FrameReader reader(socket);
  const auto payload = counting(100);
  socket.feed(data_of(100).encode());
  reader.read_ahead(0).value_or_throw();
  ASSERT_EQ(reader.next().value_or_throw(), data_of(100));
  socket.feed(payload);
  socket.feed(data_of(5).encode());
  std::vector<std::byte> target(100);
  // The target is shorter than the rest of the frame, so no byte of the next frame may be read.
  EXPECT_EQ(reader.read_payload(Bytes(target).first(60)).value_or_throw(), 60U);
  EXPECT_EQ(socket.num_pending(), 40 + LinkFrame::kBytes);
  EXPECT_EQ(reader.read_payload(Bytes(target).subspan(60)).value_or_throw(), 40U);
  EXPECT_EQ(target, payload);
  EXPECT_EQ(reader.num_left(), 0U);
  EXPECT_EQ(reader.next().value_or_throw(), data_of(5));
}

TEST(FrameReaderTest, AnInvalidHeaderIsCorruption) {
  FedSocket socket;
  FrameReader reader(socket);
  socket.feed(counting(LinkFrame::kBytes));
  reader.read_ahead(0).value_or_throw();
  EXPECT_EQ(reader.next().error().code(), ErrorCode::kCorruption);
}

}  // namespace
}  // namespace cadre
