#include "cadre/core/comm/messages/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

bool is_written(const Message& message) {
  return message.is_written == nullptr || message.is_written();
}

bool shares_order(const Message& one, const Message& other) {
  return one.tag == other.tag && one.space.number() == other.space.number();
}

bool fits(const Message& receive, const MessageHeader& header) {
  return receive.tag == header.tag && receive.space.number() == header.space;
}

}  // namespace

PointToPoint::PointToPoint(Transport& transport, Describe describe)
    : transport_(transport), describe_(std::move(describe)) {
  peers_.resize(static_cast<size_t>(transport.world_size()));
  for (int rank = 0; rank < transport.world_size(); ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.rank = rank;
    if (transport.rank() != rank) peer.channel = &transport.channel(rank);
  }
}

void PointToPoint::post(const Handle& message) {
  message->order = ++num_posted_;
  if (message->peer == kAnySource) return post_receive_from_any(message);
  Peer& peer = peers_[static_cast<size_t>(message->peer.value)];
  pending_.push_back(message);
  if (message->kind == OpKind::kRecv) return post_receive(peer, message);
  if (peer.ended) return end(message, *peer.ended);
  if (is_held(peer, *message)) {
    peer.unwritten.push_back(message);
    return;
  }
  start_send(peer, message);
}

// `message` may itself be one of the peer's unwritten sends.
bool PointToPoint::is_held(const Peer& peer, const Message& message) {
  for (const Handle& earlier : peer.unwritten) {
    if (earlier.get() == &message) break;
    if (shares_order(*earlier, message)) return true;
  }
  return !is_written(message);
}

void PointToPoint::start_send(Peer& peer, const Handle& message) {
  const uint64_t sequence = ++peer.num_sent;
  if (message->in.size() <= MessageHeader::kMaxEagerBytes) {
    return queue(peer, MessageHeader::Kind::kEager, message, sequence);
  }
  peer.requested.emplace(sequence, message);
  queue(peer, MessageHeader::Kind::kRequest, message, sequence);
}

void PointToPoint::start_written(Peer& peer) {
  for (auto next = peer.unwritten.begin(); next != peer.unwritten.end();) {
    if (is_held(peer, **next)) {
      ++next;
      continue;
    }
    start_send(peer, *next);
    next = peer.unwritten.erase(next);
  }
}

void PointToPoint::queue(Peer& peer, MessageHeader::Kind kind, const Handle& message,
                         uint64_t sequence) {
  const bool has_payload =
      kind == MessageHeader::Kind::kEager || kind == MessageHeader::Kind::kData;
  const MessageHeader header{kind,     message->dtype,       message->tag,
                             sequence, message->num_bytes(), message->space.number()};
  peer.outgoing.push_back({.header = header.encode(),
                           .payload = has_payload ? message->in : ConstBytes(),
                           .completes = has_payload ? message : nullptr});
}

void PointToPoint::post_receive(Peer& peer, const Handle& message) {
  if (take_unexpected(peer, message)) return;
  if (peer.ended) return end(message, *peer.ended);
  peer.receives.push_back(message);
}

// Posts a receive from any rank. If several ranks have already sent a matching message, takes that
// of the lowest rank.
void PointToPoint::post_receive_from_any(const Handle& message) {
  pending_.push_back(message);
  for (Peer& peer : peers_) {
    if (take_unexpected(peer, message)) return;
  }
  if (const auto error = end_of_all()) return end(message, *error);
  receives_from_any_.push_back(message);
}

bool PointToPoint::take_unexpected(Peer& peer, const Handle& message) {
  const auto arrival = std::ranges::find_if(
      peer.unexpected, [&](const Arrival& a) { return fits(*message, a.header); });
  if (arrival == peer.unexpected.end()) return false;
  const Arrival taken = std::move(*arrival);
  peer.unexpected.erase(arrival);
  peer.num_unexpected_bytes -= MessageHeader::kBytes + taken.data.size();
  message->peer = peer.rank;
  deliver(peer, message, taken);
  return true;
}

void PointToPoint::advance(TimePoint now) {
  for (Peer& peer : peers_) {
    if (peer.channel == nullptr || peer.ended) continue;
    advance_receives(peer);
    if (!peer.ended) start_written(peer);
    if (!peer.ended) advance_sends(peer);
    if (peer.is_full()) refuse_overflow(peer);
  }
  refuse_overflow_of_all();
  end_where([&](const Message& message) { return message.deadline->has_passed(now); },
            Error(ErrorCode::kTimeout, "the message did not arrive before the deadline"));
}

std::optional<PointToPoint::Unexpected> PointToPoint::first_unexpected(
    Rank source, const MessageSpace& space) const {
  for (const Peer& peer : peers_) {
    if (source != kAnySource && source != peer.rank) continue;
    for (const Arrival& arrival : peer.unexpected) {
      if (arrival.header.space == space.number()) return Unexpected{peer.rank, arrival.header.tag};
    }
  }
  return std::nullopt;
}

bool PointToPoint::has_unwritten() const {
  return std::ranges::any_of(peers_, [](const Peer& peer) { return !peer.unwritten.empty(); });
}

bool PointToPoint::is_unwritten(const Message& message) const {
  return std::ranges::any_of(peers_, [&](const Peer& peer) {
    return std::ranges::any_of(peer.unwritten,
                               [&](const Handle& held) { return held.get() == &message; });
  });
}

Status PointToPoint::wait(Deadline latest) {
  interests_.clear();
  for (const Peer& peer : peers_) {
    if (peer.channel == nullptr || peer.ended) continue;
    const bool want_recv = peer.is_in_payload || !peer.is_full();
    const bool want_send = !peer.outgoing.empty();
    const bool is_awaited = peer.is_in_payload || !peer.receives.empty() ||
                            !peer.requested.empty() || !peer.cleared.empty();
    if (want_recv || want_send) {
      interests_.push_back({peer.rank, want_send, want_recv, !want_send && !is_awaited});
    }
  }
  Deadline until = latest;
  for (const Handle& message : pending_) until = until.earlier(*message->deadline);
  const Status status = transport_.wait(interests_, until);
  if (!status.ok() && status.error().code() == ErrorCode::kTimeout) return {};
  return status;
}

void PointToPoint::abandon(const Error& error) {
  end_where([](const Message&) { return true; }, error);
  for (Peer& peer : peers_) {
    peer.unwritten.clear();
    peer.outgoing.clear();
    peer.requested.clear();
    peer.receives.clear();
    peer.cleared.clear();
    peer.receiving.reset();
  }
  receives_from_any_.clear();
}

void PointToPoint::advance_sends(Peer& peer) {
  while (!peer.outgoing.empty()) {
    Outgoing& front = peer.outgoing.front();
    const bool is_header = front.num_header_sent < MessageHeader::kBytes;
    const ConstBytes next =
        is_header ? ConstBytes(front.header).subspan(front.num_header_sent) : front.payload;
    if (!next.empty()) {
      const auto sent = peer.channel->try_send(next);
      if (!sent.ok()) return lose(peer, sent.error());
      if (*sent == 0) return;
      if (is_header) {
        front.num_header_sent += *sent;
      } else {
        front.payload = front.payload.subspan(*sent);
      }
    }
    if (front.num_header_sent < MessageHeader::kBytes || !front.payload.empty()) continue;
    if (front.completes != nullptr) end(front.completes, {});
    peer.outgoing.pop_front();
  }
}

void PointToPoint::advance_receives(Peer& peer) {
  while (peer.is_in_payload || !peer.is_full()) {
    const auto moved = peer.is_in_payload ? receive_payload(peer) : receive_header(peer);
    if (!moved.ok()) return lose(peer, moved.error());
    if (!*moved) return;
  }
}

Result<bool> PointToPoint::receive_header(Peer& peer) {
  const auto received =
      peer.channel->try_recv(Bytes(peer.header).subspan(peer.num_header_received));
  if (!received.ok()) return received.error();
  peer.num_header_received += *received;
  if (peer.num_header_received < MessageHeader::kBytes) return *received > 0;
  peer.num_header_received = 0;
  const auto header = MessageHeader::parse(peer.header);
  if (!header.ok()) return header.error();
  CADRE_RETURN_IF_ERROR(handle_header(peer, *header));
  return true;
}

Status PointToPoint::handle_header(Peer& peer, const MessageHeader& header) {
  using Kind = MessageHeader::Kind;
  if (header.kind == Kind::kClear || header.kind == Kind::kData) {
    auto& waiting = header.kind == Kind::kClear ? peer.requested : peer.cleared;
    const auto found = waiting.find(header.sequence);
    if (found == waiting.end() || found->second->num_bytes() != header.num_bytes) {
      return Error(
          ErrorCode::kCorruption,
          cadre::format("{} answers message {} of {} bytes, but no such message is pending here",
                        describe_(peer.rank), header.sequence, header.num_bytes));
    }
    const Handle message = found->second;
    waiting.erase(found);
    if (header.kind == Kind::kClear) {
      queue(peer, Kind::kData, message, header.sequence);
    } else {
      peer.receiving = message;
      peer.target = message->out;
      peer.is_in_payload = true;
    }
    return {};
  }
  Handle receive = take_receive(peer, header);
  if (receive != nullptr && !agree(peer, receive, header)) {
    return Error(ErrorCode::kInvalidArgument,
                 "an earlier message on this channel did not match its receive in size or dtype");
  }
  if (header.kind == Kind::kRequest) {
    Arrival request{header, {}};
    if (receive != nullptr) {
      deliver(peer, receive, request);
    } else {
      peer.num_unexpected_bytes += MessageHeader::kBytes;
      peer.unexpected.push_back(std::move(request));
    }
    return {};
  }
  peer.is_in_payload = true;
  peer.receiving = std::move(receive);
  if (peer.receiving == nullptr) {
    peer.stashing.emplace(Arrival{header, std::vector<std::byte>(header.num_bytes)});
  }
  peer.target = peer.receiving != nullptr ? peer.receiving->out : Bytes(peer.stashing->data);
  return {};
}

Result<bool> PointToPoint::receive_payload(Peer& peer) {
  if (!peer.target.empty()) {
    const auto received = peer.channel->try_recv(peer.target);
    if (!received.ok()) return received.error();
    if (*received == 0) return false;
    peer.target = peer.target.subspan(*received);
  }
  if (peer.target.empty()) finish_payload(peer);
  return true;
}

// Called when the payload of a message has arrived completely. A receive for the message may have
// been posted after its header arrived.
void PointToPoint::finish_payload(Peer& peer) {
  peer.is_in_payload = false;
  if (peer.receiving != nullptr) {
    end(std::exchange(peer.receiving, nullptr), {});
    return;
  }
  Arrival arrival = std::move(*peer.stashing);
  peer.stashing.reset();
  const Handle receive = take_receive(peer, arrival.header);
  if (receive != nullptr) return deliver(peer, receive, arrival);
  peer.num_unexpected_bytes += MessageHeader::kBytes + arrival.data.size();
  peer.unexpected.push_back(std::move(arrival));
}

PointToPoint::Handle PointToPoint::take_receive(Peer& peer, const MessageHeader& header) {
  const auto fits_header = [&](const Handle& message) { return fits(*message, header); };
  const auto own = std::ranges::find_if(peer.receives, fits_header);
  const auto any = std::ranges::find_if(receives_from_any_, fits_header);
  const bool has_own = own != peer.receives.end();
  const bool has_any = any != receives_from_any_.end();
  if (!has_own && !has_any) return nullptr;
  const bool takes_own = has_own && (!has_any || (*own)->order < (*any)->order);
  Handle receive = takes_own ? *own : *any;
  if (takes_own) {
    peer.receives.erase(own);
  } else {
    receives_from_any_.erase(any);
    receive->peer = peer.rank;
  }
  return receive;
}

bool PointToPoint::agree(const Peer& peer, const Handle& message, const MessageHeader& header) {
  if (header.num_bytes == message->out.size() && header.dtype == message->dtype) return true;
  end(message,
      Error(ErrorCode::kInvalidArgument,
            cadre::format("the ranks disagree: {} sent {} bytes of {}, {} receives {} bytes of {}",
                          describe_(peer.rank), header.num_bytes, header.dtype,
                          describe_(transport_.rank()), message->out.size(), message->dtype)));
  return false;
}

void PointToPoint::deliver(Peer& peer, const Handle& message, const Arrival& arrival) {
  if (!agree(peer, message, arrival.header)) return;
  if (arrival.header.kind == MessageHeader::Kind::kEager) {
    std::ranges::copy(arrival.data, message->out.begin());
    return end(message, {});
  }
  if (peer.ended) return end(message, *peer.ended);
  peer.cleared.emplace(arrival.header.sequence, message);
  queue(peer, MessageHeader::Kind::kClear, message, arrival.header.sequence);
}

// Ends the messages with a peer whose channel has ended. A message that has arrived completely can
// still be received.
void PointToPoint::lose(Peer& peer, const Error& error) {
  peer.ended = error;
  peer.unwritten.clear();
  peer.outgoing.clear();
  end_where([&](const Message& message) { return message.peer == peer.rank; }, error);
  if (const auto end = end_of_all()) {
    end_where([](const Message& message) { return message.peer == kAnySource; }, *end);
    receives_from_any_.clear();
  }
}

std::optional<Error> PointToPoint::end_of_all() const {
  const Error* last = nullptr;
  for (const Peer& peer : peers_) {
    if (peer.channel == nullptr) continue;
    if (!peer.ended) return std::nullopt;
    last = &*peer.ended;
  }
  if (last == nullptr) return std::nullopt;
  return Error(last->code(), cadre::format("no other rank can send any more: {}", last->message()));
}

// Called when too many bytes from the peer wait for a receive, so that its channel is no longer
// read. Fails the messages with this peer at once, because a message that needs more bytes would
// wait until its deadline.
void PointToPoint::refuse_overflow(Peer& peer) {
  const bool is_stuck = !peer.receives.empty() || !peer.requested.empty() || !peer.cleared.empty();
  if (!is_stuck) return;
  end_where([&](const Message& message) { return message.peer == peer.rank; }, overflow_of(peer));
}

// Does the same as refuse_overflow() for receives from any rank, if no peer's channel is read.
void PointToPoint::refuse_overflow_of_all() {
  if (receives_from_any_.empty()) return;
  const Peer* full = nullptr;
  for (const Peer& peer : peers_) {
    if (peer.channel == nullptr || peer.ended) continue;
    if (peer.is_in_payload || !peer.is_full()) return;
    full = &peer;
  }
  if (full == nullptr) return;
  end_where([](const Message& message) { return message.peer == kAnySource; }, overflow_of(*full));
  receives_from_any_.clear();
}

Error PointToPoint::overflow_of(const Peer& peer) const {
  const MessageHeader& first = peer.unexpected.front().header;
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("{} sent {} bytes of messages, the first with {}, that {} has not "
                             "received",
                             describe_(peer.rank), peer.num_unexpected_bytes,
                             MessageSpace::of_number(first.space).describe(first.tag),
                             describe_(transport_.rank())));
}

void PointToPoint::end_where(const std::function<bool(const Message&)>& matches,
                             const Error& error) {
  // Messages are copied before they are erased, so no exception can lose one.
  for (const Handle& message : pending_) {
    if (matches(*message)) ended_.push_back({message, error});
  }
  std::erase_if(pending_, [&](const Handle& message) { return matches(*message); });
}

void PointToPoint::end(const Handle& message, Status status) {
  if (std::ranges::find(pending_, message) == pending_.end()) return;
  ended_.push_back({message, std::move(status)});
  std::erase(pending_, ended_.back().message);  // `message` may refer into pending_
}

}  // namespace cadre
