#include "cadre/core/fabric/bootstrap/links.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {

Links::Links(Context context, Deadline deadline)
    : context_(std::move(context)),
      deadline_(deadline),
      callers_(context_.system, context_.identity, context_.listeners,
               static_cast<size_t>(context_.num_ranks)),
      sockets_(static_cast<size_t>(context_.num_ranks)) {}

void Links::call(int peer, const wire::RankAddress& rank_address) {
  calls_.push_back({peer, &rank_address});
}

void Links::greet_with(ConstBytes greeting, std::span<const int> peers) {
  greeting_ = greeting;
  for (const int peer : peers) greeted_[peer] = 0;
}

Status Links::await(std::span<const int> peers, const std::function<std::string(int)>& describe) {
  const auto is_missing = [this](int peer) {
    return sockets_[static_cast<size_t>(peer)] == nullptr;
  };
  while (true) {
    CADRE_RETURN_IF_ERROR(advance());
    if (std::ranges::none_of(peers, is_missing) && has_greeted_all()) return {};
    const Result<bool> has_dialed = dial_next();
    if (!has_dialed.ok()) return has_dialed.error();
    if (*has_dialed) continue;
    const Result<bool> is_ready = wait(std::nullopt);
    if (!is_ready.ok()) return is_ready.error();
    if (!deadline_.has_passed(context_.system.now())) continue;
    std::string names;
    int culprit = -1;
    for (const int peer : peers) {
      if (!is_missing(peer) && (!greeted_.contains(peer) || greeted_[peer] == greeting_.size())) {
        continue;
      }
      names += format("{}{}", names.empty() ? "" : ", ", describe(peer));
      if (culprit < 0) culprit = peer;
    }
    return Error(ErrorCode::kTimeout,
                 format("connected to the store, but not to this rank before the deadline: {}. "
                        "Look at their logs, or give more time{}",
                        names, callers_.accept_failure()))
        .with_culprit(culprit);
  }
}

Status Links::advance() {
  for (Call& call : calls_) {
    if (const Status status = step(call); !status.ok()) {
      return status.error()
          .with_context(format("connecting to {}", describe_rank(*call.rank_address, call.peer)))
          .with_culprit(call.peer);
    }
  }
  std::erase_if(calls_, [](const Call& call) { return call.rank_address == nullptr; });
  for (Handshake& handshake : callers_.advance()) place(handshake);
  return greet();
}

// A busy peer may drop a connection whose handshake takes too long (callers.h). Then this rank
// dials it again.
Status Links::step(Call& call) {
  if (!call.handshake) return {};
  const Status status = call.handshake->step();
  if (!status.ok()) {
    if (status.error().code() != ErrorCode::kPeerLost) return status;
    call.handshake.reset();
    call.not_before = context_.system.now() + kRedialPause;
  } else if (call.handshake->is_done()) {
    sockets_[static_cast<size_t>(call.peer)] = call.handshake->take();
    call.rank_address = nullptr;
  }
  return {};
}

// Opens at most one connection, so that the other connections advance in between. All ranks
// listened before they published their addresses, so if no process listens at an address, that rank
// has ended. Returns false if no connection is to be opened now.
Result<bool> Links::dial_next() {
  const TimePoint now = context_.system.now();
  const auto call = std::ranges::find_if(
      calls_, [now](const Call& one) { return !one.handshake && one.not_before <= now; });
  if (call == calls_.end()) return false;
  const Route route{{context_.rank_address, context_.identity.rank},
                    {*call->rank_address, call->peer},
                    context_.store_host,
                    wire::LinkPurpose::kControl};
  auto socket = open_socket(context_.system, route, deadline_);
  if (!socket.ok()) return socket.error();
  call->handshake = Handshake::call(context_.system, std::move(socket).value(), context_.identity,
                                    call->peer, wire::LinkPurpose::kControl);
  return true;
}

// Stores the connection of a finished handshake. A connection that this group does not need is the
// fault of the process that opened it, so it is closed without an error here.
void Links::place(Handshake& handshake) {
  const wire::Hello& hello = handshake.hello();
  const int rank = context_.identity.rank;
  if (hello.purpose != wire::LinkPurpose::kControl || hello.from == rank || hello.from < 0 ||
      hello.from >= context_.num_ranks) {
    return;
  }
  sockets_[static_cast<size_t>(hello.from)] = handshake.take();
  if (const auto found = greeted_.find(hello.from); found != greeted_.end()) found->second = 0;
}

Status Links::greet() {
  for (auto& [peer, num_sent] : greeted_) {
    os::Socket* const socket = sockets_[static_cast<size_t>(peer)].get();
    while (socket != nullptr && num_sent < greeting_.size()) {
      const Result<size_t> sent = socket->try_send(greeting_.subspan(num_sent));
      if (!sent.ok()) {
        return sent.error()
            .with_context(format("handing the layout to rank {}", peer))
            .with_culprit(peer);
      }
      if (*sent == 0) break;
      num_sent += *sent;
    }
  }
  return {};
}

bool Links::has_greeted_all() const {
  return std::ranges::all_of(
      greeted_, [this](const auto& entry) { return entry.second == greeting_.size(); });
}

Result<bool> Links::wait(std::optional<os::PollItem> item) {
  std::vector<os::PollItem> items;
  if (item) items.push_back(*item);
  callers_.add_interests(items);
  Deadline next = callers_.next_deadline(deadline_);
  for (const Call& call : calls_) {
    if (call.handshake) items.push_back(call.handshake->interest());
    if (!call.handshake) next = next.earlier(Deadline(call.not_before));
  }
  for (const auto& [peer, num_sent] : greeted_) {
    os::Socket* const socket = sockets_[static_cast<size_t>(peer)].get();
    if (socket == nullptr || num_sent == greeting_.size()) continue;
    items.push_back({.target = socket, .want_write = true});
  }
  return context_.watch.poll(items, next);
}

Status Links::repeat(const Exchange& exchange, bool is_sending,
                     const std::function<Result<bool>(os::Socket&)>& attempt) {
  while (true) {
    CADRE_RETURN_IF_ERROR(advance());
    // The socket is looked up in each iteration: if the peer connects again, its new socket
    // replaces this one.
    os::Socket& socket = *sockets_[static_cast<size_t>(exchange.peer)];
    const Result<bool> is_done = attempt(socket);
    if (!is_done.ok()) {
      return is_done.error().with_context(exchange.what).with_culprit(exchange.peer);
    }
    if (*is_done) return {};
    if (deadline_.has_passed(context_.system.now())) {
      return Error(ErrorCode::kTimeout, format("the deadline passed while {}", exchange.what))
          .with_culprit(exchange.peer);
    }
    const Result<bool> is_ready =
        wait(os::PollItem{.target = &socket, .want_read = !is_sending, .want_write = is_sending});
    if (!is_ready.ok()) return is_ready.error();
  }
}

Status Links::send(const Exchange& exchange, ConstBytes bytes) {
  return repeat(exchange, true, [&bytes](os::Socket& socket) -> Result<bool> {
    const Result<size_t> sent = socket.try_send(bytes);
    if (!sent.ok()) return sent.error();
    bytes = bytes.subspan(*sent);
    return bytes.empty();
  });
}

Status Links::receive(const Exchange& exchange, Bytes bytes) {
  return repeat(exchange, false, [&bytes](os::Socket& socket) -> Result<bool> {
    const Result<size_t> received = socket.try_recv(bytes);
    if (!received.ok()) return received.error();
    bytes = bytes.subspan(*received);
    return bytes.empty();
  });
}

Status Links::send_byte(const Exchange& exchange, bool value) {
  const std::byte byte{value};
  return send(exchange, ConstBytes(&byte, 1));
}

Result<bool> Links::receive_byte(const Exchange& exchange) {
  std::byte byte{};
  CADRE_RETURN_IF_ERROR(receive(exchange, Bytes(&byte, 1)));
  if (byte > std::byte{1}) {
    return Error(ErrorCode::kCorruption,
                 format("{}: received {}, expected 0 or 1; check that all ranks run the same build",
                        exchange.what, std::to_integer<int>(byte)))
        .with_culprit(exchange.peer);
  }
  return byte == std::byte{1};
}

Status Links::send_segment(const Exchange& exchange, const os::SharedMemory& segment) {
  return repeat(exchange, true,
                [&segment](os::Socket& socket) { return socket.try_send_segment(segment); });
}

Result<std::shared_ptr<os::SharedMemory>> Links::receive_segment(const Exchange& exchange) {
  std::shared_ptr<os::SharedMemory> segment;
  const Status status = repeat(exchange, false, [&segment](os::Socket& socket) -> Result<bool> {
    auto received = socket.try_recv_segment();
    if (!received.ok()) return received.error();
    segment = std::move(received).value();
    return segment != nullptr;
  });
  if (!status.ok()) return status.error();
  return segment;
}

bool Links::is_unix(int peer) const {
  const auto& socket = sockets_[static_cast<size_t>(peer)];
  return socket != nullptr && socket->local_address().kind == os::Address::Kind::kUnix;
}

}  // namespace cadre
