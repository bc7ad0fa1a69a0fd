#include "cadre/core/wire/control.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

constexpr uint32_t kRankAddressMagic = 0x32434443;  // "CDC2"
constexpr int kFirstErrorCode = static_cast<int>(ErrorCode::kInvalidArgument);
constexpr int kNumErrorCodes = static_cast<int>(ErrorCode::kInternal) - kFirstErrorCode + 1;

std::string_view cut(std::string_view text, size_t max_bytes = kMaxControlTextBytes) {
  return text.substr(0, max_bytes);
}

Error malformed(std::string_view what) {
  return Error(ErrorCode::kCorruption,
               format("malformed {}: expected a message of this version; check that both ends run "
                      "the same build",
                      what));
}

void write(ByteWriter& out, const Hello& m) {
  out.integer(kHandshakeVersion);
  out.integer(m.purpose);
  out.integer(m.from);
  out.integer(m.to);
  out.integer(m.round);
  out.text(cut(m.group));
  out.text(cut(m.version));
  out.raw(m.nonce);
}
void write(ByteWriter& out, const Challenge& m) {
  out.raw(m.nonce);
}
void write(ByteWriter& out, const Answer& m) {
  out.raw(m.proof);
}
void write(ByteWriter& out, const Refusal& m) {
  out.text(cut(m.reason));
}
void write(ByteWriter& out, const Activity& m) {
  out.integer(m.state);
  out.integer(m.number);
  out.integer(m.fingerprint.call);
  out.integer(m.fingerprint.shape);
  out.integer(m.waiting_for);
  out.integer(m.age_ns);
  out.text(cut(m.phase, kMaxPhaseBytes));
  out.text(cut(m.elsewhere, kMaxElsewhereBytes));
}
void write(ByteWriter& out, const AbortNotice& m) {
  out.integer(static_cast<uint8_t>(static_cast<int>(m.code) - kFirstErrorCode));
  out.integer(m.culprit);
  out.integer(m.reporter);
  out.text(cut(m.cause));
  out.text(cut(m.message));
  out.text(cut(m.remedy));
}
void write(ByteWriter& out, const Acceptance& m) {
  out.raw(m.proof);
}
void write(ByteWriter& out, const LossReport& m) {
  const size_t count = std::min(m.last.size(), kMaxLastActivities);
  out.integer(m.rank);
  out.integer(m.reporter);
  out.integer(m.sign);
  out.integer(static_cast<uint8_t>(count));
  for (size_t i = 0; i < count; ++i) {
    out.integer(m.last[i].group);
    write(out, m.last[i].activity);
  }
}
void write(ByteWriter& out, const FabricLeave& m) {
  out.integer(m.rank);
}
void write(ByteWriter& out, const GroupLeave& m) {
  out.integer(m.group);
  out.integer(m.rank);
  out.integer(m.num_collectives);
  out.integer(m.last.call);
  out.integer(m.last.shape);
}
void write(ByteWriter& out, const GroupFailure& m) {
  out.integer(m.group);
  out.integer(m.origin);
  write(out, m.notice);
}
void write(ByteWriter& out, const StatusQuestion& m) {
  out.integer(m.origin);
  out.integer(m.number);
  out.integer(m.group);
}
void write(ByteWriter& out, const StatusAnswer& m) {
  out.integer(m.origin);
  out.integer(m.number);
  out.integer(m.rank);
  write(out, m.activity);
}
void write(ByteWriter& out, const Event& event) {
  out.integer(static_cast<uint8_t>(event.index()));
  std::visit([&out](const auto& m) { write(out, m); }, event);
}
void write(ByteWriter& out, const EventBatch& m) {
  out.integer(static_cast<uint16_t>(m.events.size()));
  for (const Event& event : m.events) write(out, event);
}
void write(ByteWriter&, const Heartbeat&) {}
void write(ByteWriter&, const LeaveReceipt&) {}

// Reads an enum that is sent as one byte, its distance from the first value; nullopt if it is out
// of range.
template <typename E>
std::optional<E> read_enum(ByteReader& in, int num_values, int first_value = 0) {
  const auto value = in.integer<uint8_t>();
  if (value >= num_values) return std::nullopt;
  return static_cast<E>(first_value + value);
}

bool read(ByteReader& in, Hello& m) {
  const bool is_known = in.integer<uint8_t>() == kHandshakeVersion;
  const auto purpose = read_enum<LinkPurpose>(in, kNumLinkPurposes);
  m.from = in.integer<int32_t>();
  m.to = in.integer<int32_t>();
  m.round = in.integer<uint64_t>();
  m.group = in.text(kMaxControlTextBytes);
  m.version = in.text(kMaxControlTextBytes);
  in.raw(m.nonce);
  m.purpose = purpose.value_or(LinkPurpose::kControl);
  return is_known && purpose.has_value();
}
bool read(ByteReader& in, Challenge& m) {
  in.raw(m.nonce);
  return true;
}
bool read(ByteReader& in, Answer& m) {
  in.raw(m.proof);
  return true;
}
bool read(ByteReader& in, Refusal& m) {
  m.reason = in.text(kMaxControlTextBytes);
  return true;
}
bool read(ByteReader& in, Activity& m) {
  const auto state = read_enum<ActivityState>(in, kNumActivityStates);
  m.number = in.integer<uint64_t>();
  m.fingerprint.call = in.integer<uint64_t>();
  m.fingerprint.shape = in.integer<uint64_t>();
  m.waiting_for = in.integer<int32_t>();
  m.age_ns = in.integer<int64_t>();
  m.phase = in.text(kMaxPhaseBytes);
  m.elsewhere = in.text(kMaxElsewhereBytes);
  m.state = state.value_or(ActivityState::kNothingYet);
  return state.has_value();
}
bool read(ByteReader& in, AbortNotice& m) {
  const auto code = read_enum<ErrorCode>(in, kNumErrorCodes, kFirstErrorCode);
  m.culprit = in.integer<int32_t>();
  m.reporter = in.integer<int32_t>();
  m.cause = in.text(kMaxControlTextBytes);
  m.message = in.text(kMaxControlTextBytes);
  m.remedy = in.text(kMaxControlTextBytes);
  m.code = code.value_or(ErrorCode::kAborted);
  return code.has_value();
}
bool read(ByteReader& in, Acceptance& m) {
  in.raw(m.proof);
  return true;
}
bool read(ByteReader& in, LossReport& m) {
  m.rank = in.integer<int32_t>();
  m.reporter = in.integer<int32_t>();
  const auto sign = read_enum<SignOfLoss>(in, kNumSignsOfLoss);
  const auto count = in.integer<uint8_t>();
  m.sign = sign.value_or(SignOfLoss::kConnectionEnded);
  if (!sign || count > kMaxLastActivities) return false;
  for (size_t i = 0; i < count && in.ok(); ++i) {
    GroupActivity& last = m.last.emplace_back();
    last.group = in.integer<uint64_t>();
    if (!read(in, last.activity)) return false;
  }
  return in.ok();
}
bool read(ByteReader& in, FabricLeave& m) {
  m.rank = in.integer<int32_t>();
  return true;
}
bool read(ByteReader& in, GroupLeave& m) {
  m.group = in.integer<uint64_t>();
  m.rank = in.integer<int32_t>();
  m.num_collectives = in.integer<uint64_t>();
  m.last.call = in.integer<uint64_t>();
  m.last.shape = in.integer<uint64_t>();
  return true;
}
bool read(ByteReader& in, GroupFailure& m) {
  m.group = in.integer<uint64_t>();
  m.origin = in.integer<int32_t>();
  return read(in, m.notice);
}
bool read(ByteReader& in, StatusQuestion& m) {
  m.origin = in.integer<int32_t>();
  m.number = in.integer<uint64_t>();
  m.group = in.integer<uint64_t>();
  return true;
}
bool read(ByteReader& in, StatusAnswer& m) {
  m.origin = in.integer<int32_t>();
  m.number = in.integer<uint64_t>();
  m.rank = in.integer<int32_t>();
  return read(in, m.activity);
}

// Reads the alternative of Event with the index `type`. REQUIRES: I <= type.
template <size_t I = 0>
bool read_event_as(size_t type, ByteReader& in, Event& event) {
  if constexpr (I < std::variant_size_v<Event>) {
    if (type != I) return read_event_as<I + 1>(type, in, event);
    return read(in, event.emplace<I>());
  } else {
    return false;
  }
}
bool read(ByteReader& in, EventBatch& m) {
  const auto count = in.integer<uint16_t>();
  if (count > kMaxEventsInBatch) return false;
  for (size_t i = 0; i < count && in.ok(); ++i) {
    const auto type = in.integer<uint8_t>();
    if (!read_event_as(type, in, m.events.emplace_back())) return false;
  }
  return in.ok();
}
bool read(ByteReader&, Heartbeat&) {
  return true;
}
bool read(ByteReader&, LeaveReceipt&) {
  return true;
}

// Returns an error that names both versions if the message is a Hello of another version of the
// handshake.
Status check_handshake_version(size_t type, ByteReader in) {
  if (type != ControlMessage(Hello{}).index()) return {};
  const auto version = in.integer<uint8_t>();
  if (!in.ok() || version == kHandshakeVersion) return {};
  return Error(ErrorCode::kCorruption,
               format("the rank that connects has another version of the handshake ({}) than the "
                      "rank that accepts ({}): use one build of Cadre on all ranks",
                      version < kHandshakeVersion ? "an earlier one" : std::to_string(version),
                      kHandshakeVersion));
}

// Decodes the alternative of ControlMessage with the index `type`. REQUIRES: I <= type.
template <size_t I = 0>
Result<ControlMessage> decode_as(size_t type, ByteReader& in) {
  if constexpr (I < std::variant_size_v<ControlMessage>) {
    if (type != I) return decode_as<I + 1>(type, in);
    std::variant_alternative_t<I, ControlMessage> message;
    if (!read(in, message) || !in.is_complete()) {
      return malformed(format("control message of type {}", type));
    }
    return ControlMessage(std::move(message));
  } else {
    return malformed(format("control message of unknown type {}", type));
  }
}

}  // namespace

std::string encode_rank_address(const RankAddress& rank_address) {
  ByteWriter out;
  out.integer(kRankAddressMagic);
  out.text(cut(rank_address.version));
  out.text(cut(rank_address.host));
  out.text(cut(rank_address.boot_id));
  out.integer(rank_address.pid);
  out.text(cut(rank_address.tcp_address));
  out.text(cut(rank_address.unix_address));
  out.integer(rank_address.probe);
  out.text(cut(rank_address.core_mask));
  out.integer(rank_address.pid_namespace);
  out.integer(static_cast<uint8_t>(rank_address.device));
  return std::string(as_text(out.bytes()));
}

DeviceType read_device_type(ByteReader& in) {
  const auto type = in.integer<uint8_t>();
  if (type >= kNumDeviceTypes) in.fail();
  return static_cast<DeviceType>(type);
}

Result<RankAddress> decode_rank_address(std::string_view text) {
  ByteReader in(as_bytes(text));
  const auto magic = in.integer<uint32_t>();
  RankAddress rank_address;
  rank_address.version = in.text(kMaxControlTextBytes);
  rank_address.host = in.text(kMaxControlTextBytes);
  rank_address.boot_id = in.text(kMaxControlTextBytes);
  rank_address.pid = in.integer<int32_t>();
  rank_address.tcp_address = in.text(kMaxControlTextBytes);
  rank_address.unix_address = in.text(kMaxControlTextBytes);
  rank_address.probe = in.integer<uint64_t>();
  rank_address.core_mask = in.text(kMaxControlTextBytes);
  rank_address.pid_namespace = in.integer<uint64_t>();
  rank_address.device = read_device_type(in);
  if (magic != kRankAddressMagic || !in.is_complete())
    return malformed("address of a rank in the store");
  return rank_address;
}

std::vector<std::byte> encode_control(const ControlMessage& message) {
  ByteWriter body;
  body.integer(static_cast<uint8_t>(message.index()));
  std::visit([&body](const auto& m) { write(body, m); }, message);
  ByteWriter frame;
  frame.integer(static_cast<uint32_t>(body.bytes().size()));
  frame.raw(body.bytes());
  return frame.take();
}

std::vector<std::byte> encode_events(std::span<const Event> events) {
  constexpr size_t kBatchHeadBytes = sizeof(uint8_t) + sizeof(uint16_t);
  ByteWriter frames;
  for (size_t at = 0; at < events.size();) {
    ByteWriter bodies;
    uint16_t count = 0;
    for (; at < events.size() && count < kMaxEventsInBatch; ++at, ++count) {
      ByteWriter body;
      write(body, events[at]);
      const size_t size = kBatchHeadBytes + bodies.bytes().size() + body.bytes().size();
      if (size > kMaxControlFrameBytes) break;
      bodies.raw(body.bytes());
    }
    frames.integer(static_cast<uint32_t>(kBatchHeadBytes + bodies.bytes().size()));
    frames.integer(static_cast<uint8_t>(ControlMessage(EventBatch{}).index()));
    frames.integer(count);
    frames.raw(bodies.bytes());
  }
  return frames.take();
}

Result<ControlMessage> decode_control(ConstBytes body) {
  ByteReader in(body);
  const auto type = in.integer<uint8_t>();
  if (!in.ok()) return malformed("control message without a type");
  CADRE_RETURN_IF_ERROR(check_handshake_version(type, in));
  return decode_as(type, in);
}

void ControlSplitter::append(ConstBytes received) {
  buffer_.insert(buffer_.end(), received.begin(), received.end());
}

Result<std::optional<ControlMessage>> ControlSplitter::next() {
  constexpr size_t kPrefix = kControlPrefixBytes;
  if (buffer_.size() < kPrefix) return std::optional<ControlMessage>();
  const auto size = ByteReader(ConstBytes(buffer_).first(kPrefix)).integer<uint32_t>();
  if (size > kMaxControlFrameBytes) {
    return malformed(format("control frame of {} bytes (at most {})", size, kMaxControlFrameBytes));
  }
  if (buffer_.size() < kPrefix + size) return std::optional<ControlMessage>();
  Result<ControlMessage> message = decode_control(ConstBytes(buffer_).subspan(kPrefix, size));
  if (!message.ok()) return message.error();
  buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<ptrdiff_t>(kPrefix + size));
  return std::optional<ControlMessage>(std::move(message).value());
}

}  // namespace cadre::wire
