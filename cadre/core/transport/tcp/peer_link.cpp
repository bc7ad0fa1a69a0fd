#include "cadre/core/transport/tcp/peer_link.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {

using wire::LinkFrame;

std::shared_ptr<PeerLink::Stream> PeerLink::open(StreamId id, WaitSpot& spot) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Stream>& stream = find_or_add(id);
  stream->spot = &spot;
  return stream;
}

std::shared_ptr<PeerLink::Stream>& PeerLink::find_or_add(StreamId id) {
  std::shared_ptr<Stream>& stream = streams_[id];
  if (stream == nullptr) stream = std::make_shared<Stream>(id);
  return stream;
}

void PeerLink::detach(StreamId id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(id);
  if (found != streams_.end()) found->second->spot = nullptr;
}

// Closes the stream. If there is a connection, sends a close frame, because a thread of the peer
// may be waiting for this stream and would otherwise wait until this process ends. Bytes that the
// peer sends before it receives the close are dropped.
void PeerLink::close(StreamId id) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(id);
  if (found != streams_.end()) {
    Stream& stream = *found->second;
    stream.is_closed_here = true;
    stream.unread = {};
    streams_.erase(found);
  }
  look_for_first_frame();
  send_frame(LinkFrame::Kind::kClose, id, 0);
}

// The peer's close frame arrives after all bytes that the peer sent before it. If the peer had no
// connection when it closed the stream, it has sent no close frame. So this process asks for one
// with a probe frame.
void PeerLink::note_left(StreamId id) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = *found->second;
  if (stream.has_peer_closed || std::exchange(stream.has_peer_left, true)) return;
  end_if_unconnected(stream);
  look_for_first_frame();
  send_frame(LinkFrame::Kind::kProbe, id, 0);
}

void PeerLink::end_if_unconnected(Stream& stream) {
  if (!stream.has_peer_left || !connections_.empty()) return;
  stream.has_peer_closed = true;
  if (stream.spot) stream.spot->notify();
}

// Sets the connection over which this process sends from now on. For each stream whose group the
// peer has left, sends a probe frame, which asks the peer to close the stream.
void PeerLink::send_on(std::shared_ptr<Connection> connection) {
  sending_ = std::move(connection);
  for (const auto& [id, stream] : streams_) {
    if (stream->has_peer_left && !stream->has_peer_closed) {
      send_frame(LinkFrame::Kind::kProbe, id, 0);
    }
  }
}

void PeerLink::add(std::unique_ptr<os::Socket> socket, ConnectionEnd end) {
  const std::lock_guard lock(mutex_);
  if (end == ConnectionEnd::kAccepted) look_for_end();
  if (send_error_ || recv_error_) return;
  const auto connection = std::make_shared<Connection>(std::move(socket), end, meter_);
  connections_.push_back(connection);
  meter_.connections.fetch_add(1, std::memory_order_relaxed);
  if (end == ConnectionEnd::kDialed) {
    connection->writer.queue({});
    if (sending_ == nullptr) send_on(connection);
    flush(*connection);
  }
  notify_all();
}

Result<size_t> PeerLink::try_send(Stream& stream, const Channel::Parts& data) {
  if (data.size() == 0) return size_t{0};
  const std::lock_guard lock(mutex_);
  look_for_first_frame();
  if (stream.has_peer_closed || send_error_) {
    // Bytes that the kernel took before the error count as sent: the peer may have received all
    // bytes that it needs.
    if (const size_t num_gone = take_gone(stream, data.size()); num_gone > 0) return num_gone;
    return stream.has_peer_closed ? error_of_closed(stream) : *send_error_;
  }
  if (sending_ == nullptr) return size_t{0};
  const auto sent = send_new(stream, data);
  if (!sent.ok()) end_sending(*sending_, sent.error());
  return sent;
}

// Receives what has arrived over the connections, until this process can send over one of them. A
// connection that the peer opened can be used for sending after its first frame has arrived.
void PeerLink::look_for_first_frame() {
  for (size_t i = 0; sending_ == nullptr && i < connections_.size(); ++i) {
    const auto connection = connections_[i];
    if (const auto received = receive_any(*connection, nullptr); !received.ok()) {
      end(*connection, received.error());
    }
  }
}

// Detects connections that have ended. A peer that sees a connection end before its first frame
// opens another one. If no thread of this process waits for the peer, no thread has seen the end of
// the earlier connection yet.
void PeerLink::look_for_end() {
  // The list is copied, because end() removes connections from it.
  const Connections connections = connections_;
  for (const auto& connection : connections) receive_what_is_there(*connection);
}

void PeerLink::receive_what_is_there(Connection& connection) {
  while (!connection.has_ended) {
    const auto received = receive_any(connection, nullptr);
    if (!received.ok()) end(connection, received.error());
    if (!received.ok() || *received == 0) return;
  }
}

// The caller may offer the bytes of a partly sent frame again in smaller pieces. So this call
// reports at most `num_offered` of them as sent, and a later call reports the rest.
size_t PeerLink::take_gone(Stream& stream, size_t num_offered) {
  if (stream.num_promised == 0) return 0;
  const size_t num_gone = stream.num_promised - sending_->writer.num_kept(stream.id);
  const size_t num_reported = std::min(num_gone, num_offered);
  stream.num_promised -= num_reported;
  return num_reported;
}

Result<size_t> PeerLink::send_new(Stream& stream, Channel::Parts data) {
  FrameWriter& writer = sending_->writer;
  size_t total = 0;
  if (stream.num_promised > 0) {
    CADRE_RETURN_IF_ERROR(writer.flush());
    total = data.take_first(take_gone(stream, data.size())).size();
    if (stream.num_promised > 0) return total;
  }
  data = data.take_first(stream.window);
  if (data.size() == 0) {
    CADRE_RETURN_IF_ERROR(writer.flush());
    return total;
  }
  const auto sent = writer.send(stream.id, data);
  if (!sent.ok()) return total > 0 ? Result<size_t>(total) : Result<size_t>(sent.error());
  stream.window -= sent->num_taken + sent->num_kept;
  stream.num_promised = sent->num_kept;
  return total + sent->num_taken;
}

void PeerLink::send_frame(LinkFrame::Kind kind, StreamId id, size_t length) {
  if (sending_ == nullptr || send_error_) return;
  sending_->writer.queue({kind, id.purpose, static_cast<uint32_t>(length), id.group});
  flush(*sending_);
}

void PeerLink::flush(Connection& connection) {
  if (connection.cannot_send) return;
  if (const Status flushed = connection.writer.flush(); !flushed.ok()) {
    end_sending(connection, flushed.error());
  }
}

bool PeerLink::can_send(const Stream& stream) const {
  if (sending_ == nullptr) return false;
  const size_t num_kept = sending_->writer.num_kept(stream.id);
  return stream.num_promised > 0 ? stream.num_promised > num_kept : stream.window > 0;
}

PeerLink::Look PeerLink::prepare_wait(Stream& stream, const ChannelInterest& interest,
                                      std::vector<Polled>& polled,
                                      std::vector<os::PollItem>& items) {
  if (!interest.want_send && !interest.want_recv) return Look::kWait;
  const std::lock_guard lock(mutex_);
  if (stream.has_peer_closed || (interest.want_send && send_error_)) return Look::kReady;
  if (interest.want_recv && (recv_error_ || !stream.unread.empty())) return Look::kReady;
  if (interest.want_send && stream.num_promised > 0 && can_send(stream)) return Look::kReady;
  for (const auto& connection : connections_) {
    const bool is_head = connection->head.get() == &stream;
    if (interest.want_recv && is_head && connection->reader.has_buffered()) return Look::kReady;
    const bool can_use = interest.want_send && connection == sending_ && can_send(stream);
    // Bytes of this stream that the caller does not want yet are left in the kernel's buffer. But
    // if the send window is 0, they are read, because the credit that opens it may follow them.
    const bool is_unwanted = !interest.want_recv && is_head && stream.window > 0;
    polled.push_back({connection, &stream, interest, this});
    items.push_back(
        {.target = connection->socket.get(),
         .want_read = !is_unwanted,
         .want_write = !connection->cannot_send && (can_use || !connection->writer.is_flushed())});
  }
  return sending_ == nullptr && !send_error_ ? Look::kUnconnected : Look::kWait;
}

bool PeerLink::handle_ready(const Polled& polled, const os::PollItem& item) {
  const std::lock_guard lock(mutex_);
  Connection& connection = *polled.connection;
  Stream& stream = *polled.stream;
  const ChannelInterest& interest = polled.interest;
  if (connection.has_ended) return true;
  bool is_ready = false;
  if (item.can_write) {
    flush(connection);
    is_ready = interest.want_send && polled.connection == sending_ && can_send(stream) &&
               (connection.writer.is_flushed() || stream.num_promised > 0);
  }
  if (item.can_read && !connection.has_ended) {
    // The waiting thread receives the bytes of its stream itself, directly into its buffer.
    if (interest.want_recv && connection.head.get() == &stream) return true;
    const auto received = receive_any(connection, interest.want_recv ? &stream : nullptr);
    if (!received.ok()) end(connection, received.error());
  }
  return is_ready || has_come(polled);
}

bool PeerLink::has_come(const Polled& polled) const {
  const Connection& connection = *polled.connection;
  const Stream& stream = *polled.stream;
  if (stream.has_peer_closed || (polled.interest.want_send && send_error_)) return true;
  const bool is_buffered = connection.head.get() == &stream && connection.reader.has_buffered();
  return polled.interest.want_recv && (recv_error_ || !stream.unread.empty() || is_buffered);
}

DialTurn PeerLink::plan_dial(const ChannelInterest& interest, TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (sending_ != nullptr || send_error_) return {};
  return dials_.plan(interest, !connections_.empty(), now);
}

void PeerLink::end_dial(std::unique_ptr<os::Socket> socket, TimePoint now) {
  {
    const std::lock_guard lock(mutex_);
    dials_.end(socket != nullptr ? DialSchedule::Ending::kConnected : DialSchedule::Ending::kLate,
               now);
    if (socket == nullptr) notify_all();  // another thread may try to connect next
  }
  if (socket != nullptr) add(std::move(socket), ConnectionEnd::kDialed);
}

void PeerLink::fail(const Error& error, TimePoint now) {
  const std::lock_guard lock(mutex_);
  dials_.end(DialSchedule::Ending::kRefused, now);
  if (connections_.empty()) {
    if (!send_error_) send_error_ = error;
    if (!recv_error_) recv_error_ = error;
  }
  notify_all();
}

void PeerLink::end_sending(Connection& connection, const Error& error) {
  connection.cannot_send = true;
  if (sending_.get() != &connection || send_error_) return;
  send_error_ = error;
  notify_all();
}

// Ends a connection. The peer sends over one connection only: when that connection or all
// connections have ended, no more bytes can arrive. An accepted connection without a first frame is
// treated as if the peer had given up opening it.
void PeerLink::end(Connection& connection, const Error& error) {
  if (std::exchange(connection.has_ended, true)) return;
  std::erase_if(connections_, [&](const auto& one) { return one.get() == &connection; });
  const bool is_corrupt = error.code() == ErrorCode::kCorruption;
  const bool is_sending = sending_.get() == &connection;
  const bool was_given_up =
      connection.end == ConnectionEnd::kAccepted && !connection.has_received && !is_corrupt;
  if (was_given_up) {
    dials_.note_lost_opening();
    for (const auto& [id, stream] : streams_) end_if_unconnected(*stream);
    return notify_all();
  }
  if ((is_sending || is_corrupt) && !send_error_) send_error_ = error;
  const bool is_last = connections_.empty();
  if ((connection.is_peers || is_last || is_corrupt) && !recv_error_) recv_error_ = error;
  if (recv_error_ && !send_error_) send_error_ = error;
  // The shutdown ends the connection for the peer, too.
  if (is_corrupt) connection.socket->shutdown();
  notify_all();
}

void PeerLink::notify_all() {
  for (const auto& [id, stream] : streams_) {
    if (stream->spot) stream->spot->notify();
  }
}

Error PeerLink::error_of_closed(const Stream& stream) const {
  const std::string where = sending_ == nullptr
                                ? std::string()
                                : cadre::format(" on the connection from {} to {}",
                                                sending_->socket->local_address().to_string(),
                                                sending_->socket->peer_address().to_string());
  return Error(ErrorCode::kPeerLost, cadre::format("the peer has closed stream {} of group {:#x}{}",
                                                   stream.id.purpose, stream.id.group, where));
}

size_t PeerLink::drain() {
  const std::lock_guard lock(mutex_);
  size_t num_unsent = 0;
  // The list is copied, because end() removes connections from it.
  const Connections connections = connections_;
  for (const auto& connection : connections) {
    flush(*connection);
    if (connection->cannot_send) continue;
    receive_what_is_there(*connection);
    if (connection->has_ended) continue;
    num_unsent += connection->socket->num_unsent() + (connection->writer.is_flushed() ? 0 : 1);
  }
  return num_unsent;
}

}  // namespace cadre
