#include "cadre/wire/control.h"

#include <utility>

#include "cadre/base/format.h"
#include "cadre/wire/byte_codec.h"

namespace cadre::wire {
namespace {

constexpr uint32_t kCardMagic = 0x31434443;  // "CDC1"
constexpr int kMaxErrorCode = static_cast<int>(ErrorCode::kInternal);

std::string_view cut(std::string_view text) {
  return text.substr(0, kMaxControlTextBytes);
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
void write(ByteWriter& out, const StatusReport& m) {
  out.integer(m.request);
  out.integer(m.activity.state);
  out.integer(m.activity.number);
  out.integer(m.activity.fingerprint.call);
  out.integer(m.activity.fingerprint.shape);
  out.integer(m.activity.waiting_for);
  out.integer(m.activity.age_ns);
  out.text(cut(m.activity.phase));
}
void write(ByteWriter& out, const StatusRequest& m) {
  out.integer(m.request);
}
void write(ByteWriter& out, const AbortNotice& m) {
  out.integer(static_cast<uint8_t>(m.code));
  out.integer(m.culprit);
  out.integer(m.reporter);
  out.text(cut(m.cause));
  out.text(cut(m.message));
}
void write(ByteWriter& out, const Goodbye& m) {
  out.integer(m.number);
}
void write(ByteWriter&, const GoodbyeReceipt&) {}
void write(ByteWriter& out, const Acceptance& m) {
  out.raw(m.proof);
}

// An enum that travels as one byte; out of range is nullopt.
template <typename E>
std::optional<E> read_enum(ByteReader& in, int num_values) {
  const auto value = in.integer<uint8_t>();
  if (value >= num_values) return std::nullopt;
  return static_cast<E>(value);
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
bool read(ByteReader& in, StatusReport& m) {
  m.request = in.integer<uint64_t>();
  const auto state = read_enum<ActivityState>(in, kNumActivityStates);
  m.activity.number = in.integer<uint64_t>();
  m.activity.fingerprint.call = in.integer<uint64_t>();
  m.activity.fingerprint.shape = in.integer<uint64_t>();
  m.activity.waiting_for = in.integer<int32_t>();
  m.activity.age_ns = in.integer<int64_t>();
  m.activity.phase = in.text(kMaxControlTextBytes);
  m.activity.state = state.value_or(ActivityState::kNothingYet);
  return state.has_value();
}
bool read(ByteReader& in, StatusRequest& m) {
  m.request = in.integer<uint64_t>();
  return true;
}
bool read(ByteReader& in, AbortNotice& m) {
  const auto code = read_enum<ErrorCode>(in, kMaxErrorCode + 1);
  m.culprit = in.integer<int32_t>();
  m.reporter = in.integer<int32_t>();
  m.cause = in.text(kMaxControlTextBytes);
  m.message = in.text(kMaxControlTextBytes);
  m.code = code.value_or(ErrorCode::kAborted);
  return code.has_value();
}
bool read(ByteReader& in, Goodbye& m) {
  m.number = in.integer<uint64_t>();
  return true;
}
bool read(ByteReader&, GoodbyeReceipt&) {
  return true;
}
bool read(ByteReader& in, Acceptance& m) {
  in.raw(m.proof);
  return true;
}

// Refuses the first message of another version of the handshake with a sentence for its user.
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

// Decodes alternative number `type`, counting from I.
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

std::string encode_card(const RankCard& card) {
  ByteWriter out;
  out.integer(kCardMagic);
  out.text(cut(card.version));
  out.text(cut(card.host));
  out.text(cut(card.boot_id));
  out.integer(card.pid);
  out.text(cut(card.tcp_address));
  out.text(cut(card.unix_address));
  out.integer(card.probe);
  out.text(cut(card.core_mask));
  return std::string(as_text(out.bytes()));
}

Result<RankCard> decode_card(std::string_view text) {
  ByteReader in(as_bytes(text));
  const auto magic = in.integer<uint32_t>();
  RankCard card;
  card.version = in.text(kMaxControlTextBytes);
  card.host = in.text(kMaxControlTextBytes);
  card.boot_id = in.text(kMaxControlTextBytes);
  card.pid = in.integer<int32_t>();
  card.tcp_address = in.text(kMaxControlTextBytes);
  card.unix_address = in.text(kMaxControlTextBytes);
  card.probe = in.integer<uint64_t>();
  card.core_mask = in.text(kMaxControlTextBytes);
  if (magic != kCardMagic || !in.is_complete()) return malformed("card of a rank in the store");
  return card;
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
