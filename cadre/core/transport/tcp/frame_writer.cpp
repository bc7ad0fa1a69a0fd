#include "cadre/core/transport/tcp/frame_writer.h"

#include <algorithm>
#include <array>

namespace cadre {
namespace {

using wire::LinkFrame;

// The largest number of frames that one system call sends.
constexpr size_t kMaxFrames = 16;
constexpr size_t kPiecesOfFrame = 3;

LinkFrame data_frame(StreamId stream, size_t length) {
  return {LinkFrame::Kind::kData, stream.purpose, static_cast<uint32_t>(length), stream.group};
}

}  // namespace

void FrameWriter::queue(const LinkFrame& frame) {
  outbox_.append(frame.encode());
  meter_.frames_sent.fetch_add(1, std::memory_order_relaxed);
}

Status FrameWriter::flush() {
  while (!outbox_.empty()) {
    const auto sent = socket_.try_send(outbox_.view());
    if (!sent.ok()) return sent.error();
    if (*sent == 0) break;
    meter_.bytes_sent.fetch_add(*sent, std::memory_order_relaxed);
    consume(*sent);
  }
  return {};
}

Result<FrameWriter::Sent> FrameWriter::send(StreamId stream, const Channel::Parts& payload) {
  std::array<std::array<std::byte, LinkFrame::kBytes>, kMaxFrames> headers;
  // Each frame has three pieces: its header, and the parts of `payload.head` and `payload.body` in
  // it.
  std::array<ConstBytes, 1 + kPiecesOfFrame * kMaxFrames> pieces;
  pieces[0] = outbox_.view();
  Channel::Parts rest = payload;
  size_t num_pieces = 1;
  for (size_t frame = 0; frame < kMaxFrames && rest.size() > 0; ++frame) {
    const Channel::Parts part = rest.take_first(LinkFrame::kMaxPayloadBytes);
    headers[frame] = data_frame(stream, part.size()).encode();
    for (const ConstBytes piece : {ConstBytes(headers[frame]), part.head, part.body}) {
      pieces[num_pieces++] = piece;
    }
  }
  const auto moved = socket_.try_send_parts(std::span(pieces).first(num_pieces));
  if (!moved.ok()) return moved.error();
  const size_t from_outbox = std::min(*moved, outbox_.size());
  meter_.bytes_sent.fetch_add(from_outbox, std::memory_order_relaxed);
  consume(from_outbox);
  size_t left = *moved - from_outbox;
  Sent sent;
  for (size_t i = 1; i < num_pieces && left > 0; i += kPiecesOfFrame) {
    left -= count_frame(stream, {pieces[i], pieces[i + 1], pieces[i + 2]}, left, sent);
  }
  return sent;
}

size_t FrameWriter::count_frame(StreamId stream, const Pieces& frame, size_t num_moved,
                                Sent& sent) {
  const size_t size = frame[0].size() + frame[1].size() + frame[2].size();
  num_moved = std::min(num_moved, size);
  meter_.frames_sent.fetch_add(1, std::memory_order_relaxed);
  meter_.bytes_sent.fetch_add(num_moved, std::memory_order_relaxed);
  const size_t num_payload = num_moved - std::min(num_moved, LinkFrame::kBytes);
  sent.num_taken += num_payload;
  if (num_moved < size) {
    keep_rest(stream, frame, num_moved);
    sent.num_kept = cut_payload_ = size - LinkFrame::kBytes - num_payload;
  }
  return num_moved;
}

void FrameWriter::keep_rest(StreamId stream, const Pieces& frame, size_t num_moved) {
  for (const ConstBytes piece : frame) {
    const size_t num_gone = std::min(num_moved, piece.size());
    num_moved -= num_gone;
    outbox_.append(piece.subspan(num_gone));
  }
  cut_stream_ = stream;
  cut_left_ = outbox_.size();
}

size_t FrameWriter::num_kept(StreamId stream) const {
  return stream == cut_stream_ ? std::min(cut_left_, cut_payload_) : 0;
}

void FrameWriter::consume(size_t num_bytes) {
  if (num_bytes == 0) return;
  outbox_.consume(num_bytes);
  cut_left_ -= std::min(cut_left_, num_bytes);
}

}  // namespace cadre
