// Tests frames of which the kernel accepts only a part in one system call.
#include "cadre/core/transport/tcp/frame_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cadre/testing/core/silent_socket.h"

namespace cadre {
namespace {

using wire::LinkFrame;

// A socket that accepts as many bytes as a test allows.
class NarrowSocket final : public testing::SilentSocket {
 public:
  void allow(size_t num_bytes) { room_ = num_bytes; }
  const std::vector<std::byte>& sent() const { return sent_; }

  Result<size_t> try_send(ConstBytes data) override {
    const ConstBytes taken = data.first(std::min(room_, data.size()));
    sent_.insert(sent_.end(), taken.begin(), taken.end());
    room_ -= taken.size();
    return taken.size();
  }

 private:
  size_t room_ = 0;
  std::vector<std::byte> sent_;
};

constexpr StreamId kStream{.group = 7, .purpose = kCollectivePurpose};
constexpr StreamId kOtherStream{.group = 8, .purpose = kCollectivePurpose};

LinkFrame frame_at(const std::vector<std::byte>& stream, size_t position) {
  return LinkFrame::parse(ConstBytes(stream).subspan(position, LinkFrame::kBytes)).value_or_throw();
}

TEST(FrameWriterTest, APayloadIsDividedIntoFramesOfTheLargestSize) {
  NarrowSocket socket;
  LinkMeter meter;
  FrameWriter writer(socket, meter);
  const std::vector<std::byte> head(10, std::byte{1});
  const std::vector<std::byte> body(LinkFrame::kMaxPayloadBytes, std::byte{2});
  socket.allow(1 << 20);
  const FrameWriter::Sent sent = writer.send(kStream, {head, body}).value_or_throw();
  EXPECT_EQ(sent.num_taken, head.size() + body.size());
  EXPECT_EQ(sent.num_kept, 0U);
  EXPECT_EQ(socket.sent().size(), 2 * LinkFrame::kBytes + head.size() + body.size());
  EXPECT_EQ(frame_at(socket.sent(), 0),
            (LinkFrame{LinkFrame::Kind::kData, 1, LinkFrame::kMaxPayloadBytes, 7}));
  EXPECT_EQ(socket.sent()[LinkFrame::kBytes + 9], std::byte{1});
  EXPECT_EQ(socket.sent()[LinkFrame::kBytes + 10], std::byte{2});
  EXPECT_EQ(frame_at(socket.sent(), LinkFrame::kBytes + LinkFrame::kMaxPayloadBytes),
            (LinkFrame{LinkFrame::Kind::kData, 1, 10, 7}));
  EXPECT_EQ(meter.read().frames_sent, 2U);
  EXPECT_EQ(meter.read().bytes_sent, socket.sent().size());
}

TEST(FrameWriterTest, TheRestOfACutFrameIsKeptAndSentBeforeEverythingElse) {
  NarrowSocket socket;
  LinkMeter meter;
  FrameWriter writer(socket, meter);
  const std::vector<std::byte> body(100, std::byte{3});
  socket.allow(LinkFrame::kBytes + 30);
  const FrameWriter::Sent sent = writer.send(kStream, {{}, body}).value_or_throw();
  EXPECT_EQ(sent.num_taken, 30U);
  EXPECT_EQ(sent.num_kept, 70U);
  EXPECT_EQ(writer.num_kept(kStream), 70U);
  EXPECT_EQ(writer.num_kept(kOtherStream), 0U);
  writer.queue({LinkFrame::Kind::kClose, 1, 0, 8});
  socket.allow(20);
  ASSERT_TRUE(writer.flush().ok());
  EXPECT_EQ(writer.num_kept(kStream), 50U);
  EXPECT_FALSE(writer.is_flushed());
  socket.allow(1000);
  ASSERT_TRUE(writer.flush().ok());
  EXPECT_TRUE(writer.is_flushed());
  EXPECT_EQ(writer.num_kept(kStream), 0U);
  EXPECT_EQ(frame_at(socket.sent(), LinkFrame::kBytes + 100),
            (LinkFrame{LinkFrame::Kind::kClose, 1, 0, 8}));
  EXPECT_EQ(meter.read().frames_sent, 2U);
  EXPECT_EQ(meter.read().bytes_sent, 2 * LinkFrame::kBytes + 100);
}

TEST(FrameWriterTest, OfAFrameThatWasCutInItsHeaderAllPayloadIsKept) {
  NarrowSocket socket;
  LinkMeter meter;
  FrameWriter writer(socket, meter);
  const std::vector<std::byte> body(100, std::byte{4});
  socket.allow(5);
  const FrameWriter::Sent sent = writer.send(kStream, {{}, body}).value_or_throw();
  EXPECT_EQ(sent.num_taken, 0U);
  EXPECT_EQ(sent.num_kept, 100U);
  // 5 bytes of the header were sent. The rest of the header must not count as payload.
  EXPECT_EQ(writer.num_kept(kStream), 100U);
  socket.allow(LinkFrame::kBytes - 5 + 40);
  ASSERT_TRUE(writer.flush().ok());
  EXPECT_EQ(writer.num_kept(kStream), 60U);
}

TEST(FrameWriterTest, WhatTheKernelDoesNotTakeAtAllIsNotKept) {
  NarrowSocket socket;
  LinkMeter meter;
  FrameWriter writer(socket, meter);
  const std::vector<std::byte> body(100, std::byte{5});
  const FrameWriter::Sent sent = writer.send(kStream, {{}, body}).value_or_throw();
  EXPECT_EQ(sent.num_taken, 0U);
  EXPECT_EQ(sent.num_kept, 0U);
  EXPECT_TRUE(writer.is_flushed());
  EXPECT_EQ(meter.read().frames_sent, 0U);
}

}  // namespace
}  // namespace cadre
