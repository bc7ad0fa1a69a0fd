#include "cadre/core/wire/store/c10d_message.h"

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

// What follows the verb's byte.
enum class Body : uint8_t {
  kNothing,
  kNumber32,  // magic or nonce
  kKey,
  kKeyNumber,  // and a 64-bit number
  kKeyValue,
  kKeyTwoValues,
  kKeys,       // a 64-bit count before them
  kKeyValues,  // a 64-bit count of pairs before them
};

struct Shape {
  std::string_view name;
  Body body;
};

constexpr std::array<Shape, kNumC10dVerbs> kShapes = {{
    {"validate", Body::kNumber32},
    {"set", Body::kKeyValue},
    {"compare_set", Body::kKeyTwoValues},
    {"get", Body::kKey},
    {"add", Body::kKeyNumber},
    {"check", Body::kKeys},
    {"wait", Body::kKeys},
    {"num_keys", Body::kNothing},
    {"delete_key", Body::kKey},
    {"append", Body::kKeyValue},
    {"multi_get", Body::kKeys},
    {"multi_set", Body::kKeyValues},
    {"cancel_wait", Body::kNothing},
    {"ping", Body::kNumber32},
    {"queue_push", Body::kKeyValue},
    {"queue_pop", Body::kKey},
    {"queue_len", Body::kKey},
    {"list_keys", Body::kNothing},
    {"barrier", Body::kKeyNumber},
}};

std::string read_key(ByteReader& reader) {
  return reader.text<uint64_t>(kMaxC10dKeyBytes);
}
std::string read_value(ByteReader& reader) {
  return reader.text<uint64_t>(kMaxC10dValueBytes);
}

void read_lists(ByteReader& reader, bool with_values, C10dRequest& request) {
  const auto count = reader.integer<uint64_t>();
  if (count > kMaxC10dKeysPerRequest) reader.fail();
  for (uint64_t i = 0; i < count && reader.ok(); ++i) {
    request.keys.push_back(read_key(reader));
    if (with_values) request.values.push_back(read_value(reader));
  }
}

void read_body(ByteReader& reader, Body body, C10dRequest& request) {
  switch (body) {
    case Body::kNothing:
      return;
    case Body::kNumber32:
      request.number = reader.integer<uint32_t>();
      return;
    case Body::kKey:
      request.keys = {read_key(reader)};
      return;
    case Body::kKeyNumber:
      request.keys = {read_key(reader)};
      request.number = reader.integer<int64_t>();
      return;
    case Body::kKeyValue:
      request.keys = {read_key(reader)};
      request.values = {read_value(reader)};
      return;
    case Body::kKeyTwoValues:
      request.keys = {read_key(reader)};
      request.values.push_back(read_value(reader));
      request.values.push_back(read_value(reader));
      return;
    case Body::kKeys:
      return read_lists(reader, /*with_values=*/false, request);
    case Body::kKeyValues:
      return read_lists(reader, /*with_values=*/true, request);
  }
}

Error malformed(std::string_view what, const ByteReader& reader) {
  return Error(
      ErrorCode::kCorruption,
      format("c10d {} has a length or count over its limit before byte {}", what, reader.offset()));
}

// The common end of all decoders: a message, the wish for more bytes, or an error.
template <typename T>
Result<Decoded<T>> finish(std::string_view what, const ByteReader& reader, T message) {
  if (reader.ok()) return Decoded<T>{std::move(message), reader.offset()};
  if (reader.is_truncated() && reader.num_needed() <= kMaxC10dRequestBytes) {
    return Decoded<T>{std::nullopt, reader.num_needed()};
  }
  return malformed(what, reader);
}

}  // namespace

std::string_view to_string(C10dVerb verb) {
  return kShapes[static_cast<size_t>(verb)].name;
}

std::vector<std::byte> encode(const C10dRequest& request) {
  const Body body = kShapes[static_cast<size_t>(request.verb)].body;
  ByteWriter writer;
  writer.integer(request.verb);
  if (body == Body::kNumber32) writer.integer(static_cast<uint32_t>(request.number));
  if (body == Body::kKeys || body == Body::kKeyValues) {
    writer.integer(static_cast<uint64_t>(request.keys.size()));
  }
  for (size_t i = 0; i < request.keys.size(); ++i) {
    writer.text<uint64_t>(request.keys[i]);
    if (body == Body::kKeyValues) writer.text<uint64_t>(request.values[i]);
  }
  if (body == Body::kKeyValue || body == Body::kKeyTwoValues) {
    for (const std::string& value : request.values) writer.text<uint64_t>(value);
  }
  if (body == Body::kKeyNumber) writer.integer(request.number);
  return writer.take();
}

Result<Decoded<C10dRequest>> decode_c10d_request(ConstBytes stream) {
  ByteReader reader(stream);
  const auto verb = reader.integer<uint8_t>();
  if (verb >= kNumC10dVerbs) {
    return Error(ErrorCode::kCorruption, format("c10d request has the unknown verb {}", verb));
  }
  C10dRequest request{.verb = static_cast<C10dVerb>(verb)};
  read_body(reader, kShapes[verb].body, request);
  const auto name = to_string(request.verb);
  return finish(name, reader, std::move(request));
}

std::vector<std::byte> encode_c10d_byte(uint8_t value) {
  return {std::byte{value}};
}

std::vector<std::byte> encode_c10d_nonce(uint32_t nonce) {
  ByteWriter writer;
  writer.integer(nonce);
  return writer.take();
}

std::vector<std::byte> encode_c10d_number(int64_t number) {
  ByteWriter writer;
  writer.integer(number);
  return writer.take();
}

std::vector<std::byte> encode_c10d_value(std::string_view value) {
  ByteWriter writer;
  writer.text<uint64_t>(value);
  return writer.take();
}

Result<Decoded<uint8_t>> decode_c10d_byte(ConstBytes stream) {
  ByteReader reader(stream);
  const auto value = reader.integer<uint8_t>();
  return finish("answer", reader, value);
}

Result<Decoded<uint32_t>> decode_c10d_nonce(ConstBytes stream) {
  ByteReader reader(stream);
  const auto nonce = reader.integer<uint32_t>();
  return finish("answer", reader, nonce);
}

Result<Decoded<int64_t>> decode_c10d_number(ConstBytes stream) {
  ByteReader reader(stream);
  const auto number = reader.integer<int64_t>();
  return finish("answer", reader, number);
}

Result<Decoded<std::vector<std::string>>> decode_c10d_values(ConstBytes stream, size_t count) {
  ByteReader reader(stream);
  std::vector<std::string> values;
  for (size_t i = 0; i < count && reader.ok(); ++i) values.push_back(read_value(reader));
  return finish("answer", reader, std::move(values));
}

}  // namespace cadre::wire
