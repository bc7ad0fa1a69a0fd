#include "cadre/launch/hosts/agent_links.h"

#include <array>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::launch {
namespace {

constexpr size_t kPrefixBytes = sizeof(uint32_t);
constexpr size_t kReadBytes = 64 << 10;
// The number of bytes that one agent may send before the others are served.
constexpr size_t kMaxReadBytesPerTurn = 1 << 20;
// An agent that has not read so many bytes is stopped or unreachable, and its connection is ended.
constexpr size_t kMaxUnsentBytes = 256 << 20;
// A dial that ends later than this without an answer is logged.
constexpr Duration kUnanswered = std::chrono::milliseconds(500);

std::vector<os::Listener*> pointers_to(const std::vector<std::unique_ptr<os::Listener>>& owners) {
  std::vector<os::Listener*> listeners;
  for (const auto& owner : owners) listeners.push_back(owner.get());
  return listeners;
}

}  // namespace

AgentLinks::AgentLinks(os::System& system, Options options, os::Event& wake_up, LogSink& log)
    : system_(system),
      identity_(std::move(options.identity)),
      listeners_(std::move(options.listeners)),
      wake_up_(wake_up),
      log_(log),
      callers_(system, identity_, pointers_to(listeners_), options.num_agents) {}

void AgentLinks::connect(ConnectionId connection, const std::string& address, Deadline deadline) {
  Dial dial{.address = address, .deadline = deadline};
  try {
    dial.attempt = std::make_unique<BackgroundConnect>(
        system_, os::Address::parse("tcp:" + address), deadline, wake_up_);
  } catch (const Error& error) {  // the process has no thread left; the dial has failed
    log(LogLevel::kWarning, error.message());
    wake_up_.notify();
  }
  dials_.emplace(connection, std::move(dial));
}

void AgentLinks::send(ConnectionId connection, const Message& message) {
  const auto at = links_.find(connection);
  if (at == links_.end()) return;
  const bool is_same = message.table != nullptr && message.table == last_table_ &&
                       message.kind == MessageKind::kTable;
  if (!is_same) {
    wire::ByteWriter frame;
    const std::vector<std::byte> body = encode(message);
    frame.integer(static_cast<uint32_t>(body.size()));
    frame.raw(body);
    last_bytes_ = frame.take();
    last_table_ = message.kind == MessageKind::kTable ? message.table : nullptr;
  }
  at->second.outgoing.append(last_bytes_);
}

void AgentLinks::close(ConnectionId connection) {
  if (const auto at = links_.find(connection); at != links_.end()) {
    static_cast<void>(transmit(at->second));  // what the socket takes; the agent expects no more
    links_.erase(at);
  }
  if (const auto at = dials_.find(connection); at != dials_.end()) {
    at->second.is_dropped = true;
    if (at->second.attempt != nullptr) at->second.attempt->drop();
  }
}

std::vector<AgentLinks::Event> AgentLinks::advance() {
  std::vector<Event> events;
  accept(events);
  advance_dials(events);
  for (auto at = links_.begin(); at != links_.end();) {
    auto& [connection, link] = *at;
    Status status = receive(connection, link, events);
    if (status.ok()) status = transmit(link);
    if (status.ok()) {
      ++at;
      continue;
    }
    if (status.error().code() != ErrorCode::kPeerLost) {
      log(LogLevel::kWarning,
          format("ends the connection with {}: {}", link.socket->peer_address().to_string(),
                 status.error().message()));
    }
    events.push_back({.kind = Event::Kind::kLost, .connection = connection});
    at = links_.erase(at);
  }
  return events;
}

void AgentLinks::accept(std::vector<Event>& events) {
  for (Handshake& handshake : callers_.advance()) {
    const ConnectionId connection = std::exchange(next_accepted_, next_accepted_ + 2);
    open(connection, handshake.take());
    events.push_back({.kind = Event::Kind::kAccepted, .connection = connection});
  }
  for (const std::string& refusal : callers_.take_refusals()) {
    log(LogLevel::kWarning, "connection from " + refusal);
  }
}

void AgentLinks::advance_dials(std::vector<Event>& events) {
  for (auto at = dials_.begin(); at != dials_.end();) {
    auto& [connection, dial] = *at;
    const std::optional<Event> event = step(connection, dial);
    if (!event) {
      ++at;
      continue;
    }
    if (!dial.is_dropped) {
      if (event->kind == Event::Kind::kConnected) open(connection, dial.handshake->take());
      events.push_back(*event);
    }
    at = dials_.erase(at);
  }
}

std::optional<AgentLinks::Event> AgentLinks::step(ConnectionId connection, Dial& dial) {
  const Event failed{.kind = Event::Kind::kFailed, .connection = connection};
  if (!dial.handshake) {
    if (dial.attempt == nullptr) return failed;
    auto result = dial.attempt->take();
    if (!result) return std::nullopt;
    if (!result->ok()) {
      Event refused = failed;
      refused.is_refused = result->error().details().is_refused;
      log(LogLevel::kInfo, result->error().message());
      return refused;
    }
    if (dial.is_dropped) return failed;
    dial.handshake = Handshake::call(system_, *std::move(*result), identity_, identity_.rank,
                                     wire::LinkPurpose::kAgent);
    dial.called_at = system_.now();
  }
  const Status status = dial.handshake->step();
  if (!status.ok()) {
    const bool has_ended = status.error().code() == ErrorCode::kPeerLost;
    log(LogLevel::kWarning,
        format("the process at {}: {}{}", dial.address, status.error().message(),
               has_ended ? "; if it is no agent of cadre run, choose another port" : ""));
    return failed;
  }
  if (dial.handshake->is_done()) {
    return Event{.kind = Event::Kind::kConnected, .connection = connection};
  }
  const bool is_over = dial.is_dropped || dial.deadline.has_passed(system_.now());
  if (!is_over) return std::nullopt;
  if (system_.now() - dial.called_at >= kUnanswered) {
    log(LogLevel::kWarning,
        format(
            "the process at {} accepted the connection and did not answer: it is stopped, or it is "
            "no "
            "agent of cadre run but, for example, torchrun; start the job with `cadre run` on all "
            "hosts, or with torchrun on all",
            dial.address));
  }
  return failed;
}

void AgentLinks::open(ConnectionId connection, std::unique_ptr<os::Socket> socket) {
  links_.emplace(connection, Link{.socket = std::move(socket)});
}

Status AgentLinks::receive(ConnectionId connection, Link& link, std::vector<Event>& events) {
  for (size_t total = 0; total < kMaxReadBytesPerTurn;) {
    std::array<std::byte, kReadBytes> buffer;
    const Result<size_t> received = link.socket->try_recv(buffer);
    if (!received.ok()) return received.error();
    if (*received == 0) return {};
    total += *received;
    link.incoming.append(ConstBytes(buffer).first(*received));
    CADRE_RETURN_IF_ERROR(parse(connection, link, events));
  }
  return {};
}

Status AgentLinks::parse(ConnectionId connection, Link& link, std::vector<Event>& events) {
  while (link.incoming.size() >= kPrefixBytes) {
    const ConstBytes bytes = link.incoming.view();
    const auto size = wire::ByteReader(bytes.first(kPrefixBytes)).integer<uint32_t>();
    if (size > kMaxMessageBytes) {
      return Error(ErrorCode::kCorruption, format("a message has {} bytes, at most {} are allowed",
                                                  size, kMaxMessageBytes));
    }
    if (bytes.size() < kPrefixBytes + size) return {};
    auto message = decode_message(bytes.subspan(kPrefixBytes, size));
    if (!message.ok()) return message.error();
    events.push_back(
        {.kind = Event::Kind::kReceived, .connection = connection, .message = *std::move(message)});
    link.incoming.consume(kPrefixBytes + size);
  }
  return {};
}

Status AgentLinks::transmit(Link& link) {
  while (!link.outgoing.empty()) {
    const Result<size_t> sent = link.socket->try_send(link.outgoing.view());
    if (!sent.ok()) return sent.error();
    if (*sent == 0) break;
    link.outgoing.consume(*sent);
  }
  if (link.outgoing.size() <= kMaxUnsentBytes) return {};
  return Error(ErrorCode::kUnavailable,
               format("it has not read {} bytes of messages", link.outgoing.size()));
}

void AgentLinks::add_interests(std::vector<os::PollItem>& items) const {
  callers_.add_interests(items);
  for (const auto& [connection, dial] : dials_) {
    if (dial.handshake) items.push_back(dial.handshake->interest());
  }
  for (const auto& [connection, link] : links_) {
    items.push_back(
        {.target = link.socket.get(), .want_read = true, .want_write = !link.outgoing.empty()});
  }
}

void AgentLinks::flush(Deadline deadline) {
  while (true) {
    std::vector<os::PollItem> items;
    for (auto at = links_.begin(); at != links_.end();) {
      at = transmit(at->second).ok() ? std::next(at) : links_.erase(at);
    }
    for (const auto& [connection, link] : links_) {
      if (!link.outgoing.empty()) {
        items.push_back({.target = link.socket.get(), .want_write = true});
      }
    }
    if (items.empty() || !system_.poll(items, deadline)) return;
  }
}

std::vector<std::string> AgentLinks::peer_hosts() const {
  std::vector<std::string> hosts;
  for (const auto& [connection, link] : links_) {
    hosts.push_back(link.socket->peer_address().host);
  }
  return hosts;
}

}  // namespace cadre::launch
