#include "cadre/core/sim/connection.h"

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/sim/network.h"

namespace cadre::sim {

Result<size_t> Connection::try_send(int side, ConstBytes data) {
  CADRE_RETURN_IF_ERROR(check_sendable(side));
  const size_t room = network_.options().stream_capacity - out_of(side).num_unread;
  size_t count = std::min(room, data.size());
  if (count > 1 && network_.chance(network_.options().short_io_probability)) {
    count = 1 + network_.scheduler().random().below(count - 1);
    network_.counts().add(FaultKind::kShortIo);
  }
  if (count == 0) return size_t{0};
  transmit(side, {.bytes = {data.begin(), data.begin() + static_cast<ptrdiff_t>(count)}});
  return count;
}

Result<bool> Connection::try_send_segment(int side, std::shared_ptr<os::SharedMemory> segment) {
  CADRE_RETURN_IF_ERROR(check_sendable(side));
  if (out_of(side).num_unread == network_.options().stream_capacity) return false;
  transmit(side, {.bytes = {std::byte{0}}, .segment = std::move(segment)});
  return true;
}

Result<size_t> Connection::try_recv(int side, Bytes buffer) {
  Pipe& pipe = into(side);
  if (pipe.arrived.empty()) {
    CADRE_RETURN_IF_ERROR(check_readable(side));
    return size_t{0};
  }
  if (buffer.size() > 1 && network_.chance(network_.options().short_io_probability)) {
    buffer = buffer.first(1 + network_.scheduler().random().below(buffer.size() - 1));
    network_.counts().add(FaultKind::kShortIo);
  }
  size_t count = 0;
  while (count < buffer.size() && !pipe.arrived.empty()) {
    Packet& front = pipe.arrived.front();
    // Follows the kernel: a receive ends before a byte that carries a descriptor, and a receive
    // that takes only that byte drops the descriptor.
    if (front.segment && count > 0) break;
    const bool is_segment = front.segment != nullptr;
    const ConstBytes rest = ConstBytes(front.bytes).subspan(pipe.num_consumed);
    const ConstBytes part = rest.first(std::min(rest.size(), buffer.size() - count));
    std::copy(part.begin(), part.end(), buffer.begin() + static_cast<ptrdiff_t>(count));
    count += part.size();
    pipe.num_consumed += part.size();
    if (pipe.num_consumed == front.bytes.size()) {
      pipe.arrived.pop_front();
      pipe.num_consumed = 0;
    }
    if (is_segment) break;
  }
  pipe.num_unread -= count;
  touch_ends();  // the other end can send again
  return count;
}

Result<std::shared_ptr<os::SharedMemory>> Connection::try_recv_segment(int side) {
  Pipe& pipe = into(side);
  if (pipe.arrived.empty()) {
    CADRE_RETURN_IF_ERROR(check_readable(side));
    return std::shared_ptr<os::SharedMemory>();
  }
  if (!pipe.arrived.front().segment) {
    return Error(
        ErrorCode::kCorruption,
        cadre::format("receive a segment from {}: the next byte carries none; the two ends "
                      "are out of step, check that both run the same version",
                      end(1 - side).address.to_string()));
  }
  std::shared_ptr<os::SharedMemory> segment = std::move(pipe.arrived.front().segment);
  pipe.arrived.pop_front();
  pipe.num_unread -= 1;
  touch_ends();
  return segment;
}

bool Connection::can_send(int side) const {
  return !check_sendable(side).ok() || out_of(side).num_unread < network_.options().stream_capacity;
}

bool Connection::can_recv(int side) const {
  return !into(side).arrived.empty() || !check_readable(side).ok();
}

bool Connection::is_open() const {
  return std::none_of(sides_.begin(), sides_.end(),
                      [](const SideState& side) { return side.is_shut || side.is_broken; });
}

void Connection::shutdown(int side) {
  if (state(side).is_shut) return;
  state(side).is_shut = true;
  network_.scheduler().touch(end(side).rank);
  if (!state(side).is_broken) transmit(side, {.is_end = true});
}

void Connection::close(int side) {
  const bool was_shut = state(side).is_shut;
  state(side).is_shut = true;
  network_.scheduler().touch(end(side).rank);
  if (state(side).is_broken) return;
  if (!into(side).arrived.empty()) {
    into(side).arrived.clear();
    transmit(side, {.is_reset = true});
  } else if (!was_shut) {
    transmit(side, {.is_end = true});
  }
}

void Connection::reset() {
  for (const int side : {0, 1}) {
    state(side).is_broken = true;
    into(side).arrived.clear();
    into(side).num_consumed = 0;
    network_.scheduler().touch(end(side).rank);
  }
}

void Connection::transmit(int side, Packet packet) {
  Pipe& pipe = out_of(side);
  const int from = end(side).rank;
  const int to = end(1 - side).rank;
  pipe.num_unread += packet.bytes.size();
  network_.scheduler().touch(from);
  const TimePoint now = network_.scheduler().now();
  const Network::Transit transit = network_.transit(from, to, packet.bytes.size());
  // Packets of one stream arrive in order.
  pipe.last_arrival = std::max(pipe.last_arrival, now + transit.time);
  const uint64_t number = network_.next_packet_number();
  network_.deliver(from, to, pipe.last_arrival, transit,
                   [self = shared_from_this(), side, number,
                    shared = std::make_shared<Packet>(std::move(packet))] {
                     self->arrive(side, number, std::move(*shared));
                   });
}

void Connection::arrive(int side, uint64_t number, Packet packet) {
  network_.note_arrival(number);
  const int receiver = 1 - side;
  Pipe& pipe = out_of(side);
  if (state(receiver).is_broken) return;
  touch_ends();
  if (packet.is_reset) {
    state(receiver).is_broken = true;
  } else if (packet.is_end) {
    pipe.has_ended = true;
  } else if (state(receiver).is_shut) {
    // The receiver has closed the stream: its kernel answers with a reset.
    pipe.num_unread -= packet.bytes.size();
    transmit(receiver, {.is_reset = true});
  } else {
    pipe.arrived.push_back(std::move(packet));
  }
}

void Connection::touch_ends() {
  for (const End& one : ends_) network_.scheduler().touch(one.rank);
}

Status Connection::check_sendable(int side) const {
  if (state(side).is_shut) return describe(side, "was ended by this end");
  if (state(side).is_broken) return describe(side, "broke: Connection reset by peer");
  return {};
}

Status Connection::check_readable(int side) const {
  if (state(side).is_shut) return describe(side, "was ended by this end");
  if (state(side).is_broken) return describe(side, "broke: Connection reset by peer");
  if (into(side).has_ended) return describe(side, "was ended by the other end");
  return {};
}

Error Connection::describe(int side, std::string_view what) const {
  return Error(ErrorCode::kPeerLost,
               cadre::format("connection from {} to {} {}", end(side).address.to_string(),
                             end(1 - side).address.to_string(), what));
}

}  // namespace cadre::sim
