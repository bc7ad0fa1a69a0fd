#include "cadre/core/transport/tcp/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace cadre {

using wire::LinkFrame;

Result<std::optional<LinkFrame>> FrameReader::next() {
  if (end_ - begin_ < LinkFrame::kBytes) return std::optional<LinkFrame>();
  const auto frame = LinkFrame::parse(ConstBytes(inbox_).subspan(begin_, LinkFrame::kBytes));
  if (!frame.ok()) return frame.error();
  begin_ += LinkFrame::kBytes;
  if (frame->kind == LinkFrame::Kind::kData) num_left_ = frame->length;
  return std::optional<LinkFrame>(*frame);
}

ConstBytes FrameReader::take_buffered(size_t at_most) {
  const size_t size = std::min({at_most, num_left_, end_ - begin_});
  const ConstBytes taken = ConstBytes(inbox_).subspan(begin_, size);
  begin_ += size;
  num_left_ -= size;
  return taken;
}

Result<size_t> FrameReader::read_ahead(size_t num_expected) {
  const size_t num_pending = end_ - begin_;
  if (num_pending > 0 && begin_ > 0) {
    std::memmove(inbox_.data(), inbox_.data() + begin_, num_pending);
  }
  begin_ = 0;
  end_ = num_pending;
  const size_t size = LinkFrame::kBytes + std::min(num_expected, kBytesAhead);
  const auto received = socket_.try_recv(Bytes(inbox_).subspan(end_, size - end_));
  if (received.ok()) end_ += *received;
  return received;
}

Result<size_t> FrameReader::read_payload(Bytes target) {
  const Bytes payload = target.first(std::min(target.size(), num_left_));
  const bool reaches_end = payload.size() == num_left_;
  const std::array<Bytes, 2> parts = {payload, Bytes(inbox_).first(LinkFrame::kBytes)};
  const auto received =
      socket_.try_recv_parts(std::span(parts).first(reaches_end ? parts.size() : 1));
  if (!received.ok()) return received;
  const size_t num_payload = std::min(*received, payload.size());
  num_left_ -= num_payload;
  begin_ = 0;
  end_ = *received - num_payload;
  return num_payload;
}

}  // namespace cadre
