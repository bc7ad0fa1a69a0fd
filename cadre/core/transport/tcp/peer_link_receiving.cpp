// The receiving half of a link: moves the bytes of its connections into streams.
#include <algorithm>
#include <cstring>
#include <new>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/transport/tcp/peer_link.h"

namespace cadre {
namespace {

using wire::LinkFrame;

constexpr size_t kCreditBytes = LinkFrame::kWindowBytes / 4;
// The maximum number of streams of one link, including streams that only the peer has opened. All
// members of a group create it together, so a correct peer never opens so many streams ahead of
// this process.
constexpr size_t kMaxStreams = 64 << 10;

Error violation(int peer, StreamId id, std::string_view what) {
  return Error(ErrorCode::kCorruption,
               cadre::format("data connection to process rank {}, stream {} of group {:#x}: {}; "
                             "check that all ranks run the same build",
                             peer, id.purpose, id.group, what));
}

}  // namespace

Result<size_t> PeerLink::try_recv(Stream& stream, Bytes buffer) {
  if (buffer.empty()) return size_t{0};
  const std::lock_guard lock(mutex_);
  if (const size_t taken = take_unread(stream, buffer); taken > 0) return taken;
  stream.num_expected = buffer.size();
  for (size_t i = 0; !stream.has_peer_closed && i < connections_.size(); ++i) {
    // The shared_ptr is copied, because end() removes the connection from the list.
    const auto connection = connections_[i];
    const auto received = receive_from(*connection, stream, buffer);
    if (!received.ok()) {
      end(*connection, received.error());
    } else if (*received > 0) {
      return received;
    }
  }
  // A connection that has just ended may have delivered bytes before its end.
  if (const size_t taken = take_unread(stream, buffer); taken > 0) return taken;
  if (stream.has_peer_closed) return error_of_closed(stream);
  if (recv_error_) return *recv_error_;
  return size_t{0};
}

size_t PeerLink::take_unread(Stream& stream, Bytes buffer) {
  const size_t size = std::min(buffer.size(), stream.unread.size());
  if (size == 0) return 0;
  std::memcpy(buffer.data(), stream.unread.view().data(), size);
  stream.unread.consume(size);
  count_received(stream, size);
  return size;
}

// Receives bytes of `stream`. Bytes of other streams that come first are moved to the buffers of
// these streams.
Result<size_t> PeerLink::receive_from(Connection& connection, Stream& stream, Bytes buffer) {
  while (connection.head.get() != &stream) {
    const auto received = receive_any(connection, &stream);
    if (!received.ok()) return received;
    if (const size_t taken = take_unread(stream, buffer); taken > 0) return taken;
    if (*received == 0 || stream.has_peer_closed) return size_t{0};
  }
  return take_head(connection, buffer);
}

Result<size_t> PeerLink::take_head(Connection& connection, Bytes buffer) {
  const std::shared_ptr<Stream> stream = connection.head;
  const ConstBytes buffered = connection.reader.take_buffered(buffer.size());
  size_t num_received = buffered.size();
  if (num_received > 0) {
    std::memcpy(buffer.data(), buffered.data(), num_received);
  } else {
    const auto received = connection.reader.read_payload(buffer);
    if (!received.ok() || *received == 0) return received;
    num_received = *received;
  }
  count_received(*stream, num_received);
  if (connection.reader.num_left() == 0) {
    CADRE_RETURN_IF_ERROR(handle_frames(connection, stream.get()));
  }
  return num_received;
}

// Reads once from the connection, whichever stream the bytes belong to. Returns 0 if no byte has
// arrived.
Result<size_t> PeerLink::receive_any(Connection& connection, const Stream* receiver) {
  // Payload was left in the reader's buffer for a thread that then did not receive it. It is moved
  // to its stream.
  if (connection.reader.has_buffered()) {
    const size_t num_left = connection.reader.num_left();
    CADRE_RETURN_IF_ERROR(handle_frames(connection, nullptr));
    return num_left;
  }
  size_t num_received = 0;
  if (connection.head == nullptr) {
    const auto received = connection.reader.read_ahead(
        receiver != nullptr ? receiver->num_expected : LinkFrame::kMaxPayloadBytes);
    if (!received.ok()) return received;
    num_received = *received;
  } else {
    wire::StreamBuffer& unread = connection.head->unread;
    const size_t room = connection.reader.num_left();
    const auto received = connection.reader.read_payload(unread.extend(room));
    num_received = received.ok() ? *received : 0;
    unread.drop_last(room - num_received);
    if (!received.ok()) return received;
    if (connection.head->is_closed_here) unread = {};
    if (num_received > 0 && connection.head->spot) connection.head->spot->notify();
  }
  if (num_received > 0) CADRE_RETURN_IF_ERROR(handle_frames(connection, receiver));
  return num_received;
}

// Handles the bytes in the reader's buffer: the rest of a frame, then complete frames, then the
// beginning of a frame. If there is no memory for the payload of a stream, returns an error,
// because the frames behind that payload cannot be received.
Status PeerLink::handle_frames(Connection& connection, const Stream* receiver) try {
  while (true) {
    if (connection.head != nullptr) {
      Stream& stream = *connection.head;
      if (&stream == receiver && stream.unread.empty() && connection.reader.has_buffered()) {
        return {};
      }
      const ConstBytes payload = connection.reader.take_buffered(connection.reader.num_left());
      if (!payload.empty() && !stream.is_closed_here) stream.unread.append(payload);
      if (!payload.empty() && stream.spot) stream.spot->notify();
      if (connection.reader.num_left() > 0) return {};
      connection.head.reset();
    }
    const auto frame = connection.reader.next();
    if (!frame.ok()) return frame.error();
    if (!*frame) return {};
    CADRE_RETURN_IF_ERROR(handle(connection, **frame));
  }
} catch (const std::bad_alloc&) {
  return Error(ErrorCode::kUnavailable, "out of memory");
}

Status PeerLink::handle(Connection& connection, const LinkFrame& frame) {
  const bool is_first = !std::exchange(connection.has_received, true);
  if (is_first && sending_ == nullptr && connection.end == ConnectionEnd::kAccepted) {
    const auto found =
        std::ranges::find(connections_, &connection, &std::shared_ptr<Connection>::get);
    send_on(*found);
    notify_all();
  }
  if (frame.kind == LinkFrame::Kind::kOpen) return {};
  connection.is_peers = true;
  switch (frame.kind) {
    case LinkFrame::Kind::kData:
      return handle_data(connection, frame);
    case LinkFrame::Kind::kCredit:
      return handle_credit(frame);
    case LinkFrame::Kind::kProbe:
      if (closed_.contains({frame.group, frame.purpose})) {
        send_frame(LinkFrame::Kind::kClose, {frame.group, frame.purpose}, 0);
      }
      return {};
    default:
      return handle_close({frame.group, frame.purpose});
  }
}

Status PeerLink::handle_data(Connection& connection, const LinkFrame& frame) {
  const StreamId id{frame.group, frame.purpose};
  const auto found = streams_.find(id);
  const bool is_new = found == streams_.end();
  if (is_new && streams_.size() >= kMaxStreams) return violation(peer_, id, "too many streams");
  connection.head = is_new ? find_or_add(id) : found->second;
  Stream& stream = *connection.head;
  if (is_new && closed_.contains(id)) {
    stream.is_closed_here = true;
    send_frame(LinkFrame::Kind::kClose, id, 0);
  }
  if (stream.is_closed_here) return {};
  stream.num_unread += frame.length;
  if (stream.num_unread + stream.num_to_credit > LinkFrame::kWindowBytes) {
    return violation(peer_, id, "the peer has sent beyond its window");
  }
  return {};
}

Status PeerLink::handle_credit(const LinkFrame& frame) {
  const auto found = streams_.find({frame.group, frame.purpose});
  if (found == streams_.end()) return {};  // the stream was closed at this end
  Stream& stream = *found->second;
  if (frame.length > LinkFrame::kWindowBytes - stream.window) {
    return violation(peer_, stream.id, "the peer gives credit for bytes that were not sent");
  }
  stream.window += frame.length;
  if (stream.spot) stream.spot->notify();
  return {};
}

Status PeerLink::handle_close(StreamId id) {
  const auto found = streams_.find(id);
  const bool is_known = found != streams_.end();
  if (is_known ? found->second->is_closed_here : closed_.contains(id)) {
    if (is_known) streams_.erase(found);
    return {};
  }
  if (!is_known && streams_.size() >= kMaxStreams) return violation(peer_, id, "too many streams");
  Stream& stream = *find_or_add(id);
  stream.has_peer_closed = true;
  if (stream.spot) stream.spot->notify();
  return {};
}

void PeerLink::count_received(Stream& stream, size_t num_bytes) {
  stream.num_unread -= num_bytes;
  stream.num_to_credit += num_bytes;
  if (stream.num_to_credit < kCreditBytes || stream.has_peer_closed) return;
  send_frame(LinkFrame::Kind::kCredit, stream.id, std::exchange(stream.num_to_credit, 0));
}

}  // namespace cadre
