#include "cadre/core/fabric/plane/control_link.h"

#include <array>
#include <utility>

#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

// Status questions and answers are dropped while more bytes than this are unsent.
constexpr size_t kFullOutboxBytes = 64 << 10;

uint64_t count_frames(ConstBytes stream) {
  uint64_t count = 0;
  for (; !stream.empty(); ++count) {
    const auto size = wire::ByteReader(stream).integer<uint32_t>();
    stream = stream.subspan(wire::kControlPrefixBytes + size);
  }
  return count;
}

bool is_of_status(const wire::Event& event) {
  return std::holds_alternative<wire::StatusQuestion>(event) ||
         std::holds_alternative<wire::StatusAnswer>(event);
}

}  // namespace

ControlLink::ControlLink(Setup setup, ControlMeter& meter)
    : setup_(std::move(setup)), meter_(meter) {
  ++meter_.connections;
  // A heartbeat is sent at once, so that the peer soon knows that both ends use this connection.
  if (setup_.is_healed) beat();
}

void ControlLink::post(const wire::Event& event) {
  if (outbox_.size() > kFullOutboxBytes && is_of_status(event)) return;
  pending_.push_back(event);
}

void ControlLink::beat() {
  const bool is_idle = !has_sent_ && is_flushed();
  has_sent_ = false;
  if (!is_idle) return;
  outbox_.append(wire::encode_control(wire::Heartbeat{}));
  ++meter_.frames_sent;
  ++meter_.heartbeats_sent;
  flush();
  has_sent_ = false;  // a heartbeat does not count as sent bytes, so the next one is sent, too
}

// Does not return an error of the stream: the next receive() returns it.
void ControlLink::flush() {
  if (!pending_.empty()) {
    const std::vector<std::byte> frames = wire::encode_events(pending_);
    pending_.clear();
    outbox_.append(frames);
    meter_.frames_sent += count_frames(frames);
  }
  if (std::exchange(owes_receipt_, false)) {
    outbox_.append(wire::encode_control(wire::LeaveReceipt{}));
    ++meter_.frames_sent;
  }
  while (!outbox_.empty()) {
    const Result<size_t> sent = setup_.socket->try_send(outbox_.view());
    ++meter_.sends;
    if (!sent.ok() || *sent == 0) break;
    meter_.bytes_sent += *sent;
    has_sent_ = true;
    outbox_.consume(*sent);
  }
}

Status ControlLink::receive(std::vector<wire::ControlMessage>& messages) {
  std::array<std::byte, 16384> buffer;
  while (true) {
    const Result<size_t> received = setup_.socket->try_recv(buffer);
    if (!received.ok()) return received.error();
    if (*received == 0) return {};
    meter_.bytes_received += *received;
    silent_for = Duration(0);
    splitter_.append(ConstBytes(buffer).first(*received));
    while (true) {
      auto message = splitter_.next();
      if (!message.ok()) return message.error();
      if (!message.value()) break;
      ++meter_.frames_received;
      has_heard_ = true;
      messages.push_back(*std::move(message).value());
    }
  }
}

}  // namespace cadre
