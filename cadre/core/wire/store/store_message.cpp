#include "cadre/core/wire/store/store_message.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

// The format of a request after the byte of its verb.
enum class Body : uint8_t {
  kNothing,
  kNumber32,  // the magic of validate, or the nonce of a ping
  kKey,
  kKeyNumber,  // a key and a 64-bit number
  kKeyValue,
  kKeyTwoValues,
  kKeys,       // a 64-bit count, then the keys
  kKeyValues,  // a 64-bit count of pairs, then the pairs
  kHello,      // the 64-bit protocol version, the build as a key, the nonce as a value
  kProof,      // one value, the proof
};

// The format of an answer.
enum class Answer : uint8_t {
  kNothing,
  kByte,
  kAllThere,  // a byte: 0 if all keys are set, else 1
  kNumber32,
  kNumber,
  kValue,
  kValues,  // one value for each key of the request
  kList,    // a 64-bit count, then the keys
  kItem,    // the 64-bit length of the queue, and its first item unless the length is 0
  kHello,   // the 64-bit protocol version, the build and the nonce
};

enum class For : uint8_t { kStore, kConnection };

struct Shape {
  std::string_view name;
  Body body;
  Answer answer;
  For recipient = For::kStore;
};

constexpr std::array<Shape, kNumC10dVerbs> kC10dShapes = {{
    {"validate", Body::kNumber32, Answer::kNothing, For::kConnection},
    {"set", Body::kKeyValue, Answer::kNothing},
    {"compare_set", Body::kKeyTwoValues, Answer::kValue},
    {"get", Body::kKey, Answer::kValue},
    {"add", Body::kKeyNumber, Answer::kNumber},
    {"check", Body::kKeys, Answer::kAllThere},
    {"wait", Body::kKeys, Answer::kByte},
    {"num_keys", Body::kNothing, Answer::kNumber},
    {"erase", Body::kKey, Answer::kNumber},
    {"append", Body::kKeyValue, Answer::kNothing},
    {"multi_get", Body::kKeys, Answer::kValues},
    {"multi_set", Body::kKeyValues, Answer::kNothing},
    {"cancel", Body::kNothing, Answer::kByte, For::kConnection},
    {"ping", Body::kNumber32, Answer::kNumber32, For::kConnection},
    {"queue_push", Body::kKeyValue, Answer::kNothing},
    {"try_queue_pop", Body::kKey, Answer::kItem},
    {"queue_length", Body::kKey, Answer::kNumber},
    {"list_keys", Body::kNothing, Answer::kList},
    {"barrier", Body::kKeyNumber, Answer::kByte},
}};

constexpr std::array<Shape, kNumOwnVerbs> kOwnShapes = {{
    {"hello", Body::kHello, Answer::kHello, For::kConnection},
    {"prove", Body::kProof, Answer::kValue, For::kConnection},
    {"queue_pop", Body::kKey, Answer::kValue},
    {"leave_will", Body::kKeyValue, Answer::kNothing, For::kConnection},
    {"retract_will", Body::kNothing, Answer::kNothing, For::kConnection},
}};

// Returns the format of a verb; null if the number is no verb.
const Shape* find_shape(StoreVerb verb) {
  const auto number = static_cast<size_t>(verb);
  if (number < kC10dShapes.size()) return &kC10dShapes[number];
  const size_t own = number - static_cast<size_t>(StoreVerb::kHello);
  return own < kOwnShapes.size() ? &kOwnShapes[own] : nullptr;
}

constexpr size_t kAnyCount = static_cast<size_t>(-1);

// The numbers of keys and values in a request. kAnyCount keys means any number; kAnyCount values
// means as many values as keys.
struct Counts {
  size_t num_keys;
  size_t num_values;
};

Counts counts_of(Body body) {
  switch (body) {
    case Body::kNothing:
    case Body::kNumber32:
      return {0, 0};
    case Body::kKey:
    case Body::kKeyNumber:
      return {1, 0};
    case Body::kKeyValue:
    case Body::kHello:
      return {1, 1};
    case Body::kKeyTwoValues:
      return {1, 2};
    case Body::kKeys:
      return {kAnyCount, 0};
    case Body::kKeyValues:
      return {kAnyCount, kAnyCount};
    case Body::kProof:
      return {0, 1};
  }
  return {0, 0};
}

// The decoded fields of a message that may be incomplete. The texts are views, so that a long
// message that arrives in pieces is copied only once.
struct Parts {
  int64_t number = 0;
  std::vector<std::string_view> keys;
  std::vector<std::string_view> values;
};

std::vector<std::string> to_strings(const std::vector<std::string_view>& views) {
  return {views.begin(), views.end()};
}

// Reads a short text: the name of a build, a nonce or a proof.
std::string_view read_short(ByteReader& reader) {
  return reader.view<uint64_t>(kMaxBuildBytes);
}

uint64_t read_count(ByteReader& reader) {
  const auto count = reader.integer<uint64_t>();
  if (count > kMaxKeysPerRequest) reader.fail();
  return count;
}

enum class Texts : uint8_t { kKeys, kValues, kPairs };

void read_text(ByteReader& reader, Texts texts, uint64_t index, Parts& parts) {
  const bool is_key = texts == Texts::kKeys || (texts == Texts::kPairs && index % 2 == 0);
  const size_t max_bytes = is_key ? kMaxSentKeyBytes : kMaxValueBytes;
  (is_key ? parts.keys : parts.values).push_back(reader.view<uint64_t>(max_bytes));
}

// Reads `count` texts. The lists grow as texts are read: no memory is reserved for `count`, which
// is not trusted.
void read_texts(ByteReader& reader, Texts texts, uint64_t count, Parts& parts, Progress& progress) {
  if (progress.num_texts > 0) {
    // First reads the texts after those that an earlier call has decoded. The earlier ones are read
    // again only when the message is complete.
    ByteReader rest = reader;
    Parts unused;
    rest.skip_to(progress.num_bytes);
    for (uint64_t i = progress.num_texts; i < count && rest.ok(); ++i) {
      read_text(rest, texts, i, unused);
      if (rest.ok()) progress = {.num_bytes = rest.offset(), .num_texts = i + 1};
    }
    if (!rest.ok()) {
      reader = rest;
      return;
    }
  }
  for (uint64_t i = 0; i < count && reader.ok(); ++i) {
    read_text(reader, texts, i, parts);
    if (reader.ok()) progress = {.num_bytes = reader.offset(), .num_texts = i + 1};
  }
}

void read_body(ByteReader& reader, Body body, Parts& parts, Progress& progress) {
  switch (body) {
    case Body::kNothing:
      return;
    case Body::kNumber32:
      parts.number = reader.integer<uint32_t>();
      return;
    case Body::kKeys:
      return read_texts(reader, Texts::kKeys, read_count(reader), parts, progress);
    case Body::kKeyValues:
      return read_texts(reader, Texts::kPairs, 2 * read_count(reader), parts, progress);
    case Body::kHello:
      parts.number = reader.integer<int64_t>();
      parts.keys.push_back(read_short(reader));
      parts.values.push_back(read_short(reader));
      return;
    case Body::kProof:
      parts.values.push_back(read_short(reader));
      return;
    default:
      break;
  }
  read_text(reader, Texts::kKeys, 0, parts);
  if (body == Body::kKeyNumber) parts.number = reader.integer<int64_t>();
  for (size_t i = 0; i < counts_of(body).num_values; ++i) {
    read_text(reader, Texts::kValues, i, parts);
  }
}

void read_byte(ByteReader& reader, Parts& parts) {
  const auto byte = reader.integer<uint8_t>();
  if (byte > 1) reader.fail();
  parts.number = byte;
}

void read_answer(ByteReader& reader, Answer answer, size_t num_keys, Parts& parts,
                 Progress& progress) {
  switch (answer) {
    case Answer::kNothing:
      return;
    case Answer::kByte:
      return read_byte(reader, parts);
    case Answer::kAllThere:
      read_byte(reader, parts);
      parts.number = 1 - parts.number;
      return;
    case Answer::kNumber32:
      parts.number = reader.integer<uint32_t>();
      return;
    case Answer::kNumber:
      parts.number = reader.integer<int64_t>();
      return;
    case Answer::kValue:
      return read_text(reader, Texts::kValues, 0, parts);
    case Answer::kValues:
      return read_texts(reader, Texts::kValues, num_keys, parts, progress);
    case Answer::kList:
      return read_texts(reader, Texts::kValues, read_count(reader), parts, progress);
    case Answer::kItem:
      parts.number = reader.integer<int64_t>();
      if (parts.number > 0) read_text(reader, Texts::kValues, 0, parts);
      return;
    case Answer::kHello:
      parts.number = reader.integer<int64_t>();
      parts.values.push_back(read_short(reader));
      parts.values.push_back(read_short(reader));
      return;
  }
}

// Returns the result for a message that could not be decoded: the number of bytes that it needs if
// it is incomplete, or an error if it is invalid.
template <typename T>
Result<Decoded<T>> unread(std::string_view what, const ByteReader& reader, Progress& progress) {
  if (reader.is_truncated() && reader.num_needed() <= kMaxMessageBytes) {
    progress.num_needed = reader.num_needed();
    return Decoded<T>{std::nullopt, reader.num_needed()};
  }
  return Error(ErrorCode::kCorruption,
               format("store {} has a length, count or byte over its limit before byte {}", what,
                      reader.offset()));
}

constexpr uint8_t kNoError = 0;
constexpr uint8_t kMaxErrorCode = static_cast<uint8_t>(ErrorCode::kInternal);
constexpr size_t kMaxErrorBytes = 64 << 10;

void write_answer(ByteWriter& writer, Answer answer, const StoreResponse& response) {
  switch (answer) {
    case Answer::kNothing:
      return;
    case Answer::kByte:
      return writer.integer(static_cast<uint8_t>(response.number));
    case Answer::kAllThere:
      return writer.integer(static_cast<uint8_t>(1 - response.number));
    case Answer::kNumber32:
      return writer.integer(static_cast<uint32_t>(response.number));
    case Answer::kNumber:
    case Answer::kItem:
    case Answer::kHello:
      writer.integer(response.number);
      break;
    case Answer::kList:
      writer.integer(static_cast<uint64_t>(response.values.size()));
      break;
    case Answer::kValue:
    case Answer::kValues:
      break;
  }
  for (const std::string& value : response.values) writer.text<uint64_t>(value);
}

Result<Decoded<StoreResponse>> finish_answer(ByteReader& reader, const StoreRequest& request,
                                             Progress& progress) {
  Parts parts;
  const Shape* shape = find_shape(request.verb);
  if (reader.ok()) read_answer(reader, shape->answer, request.keys.size(), parts, progress);
  if (!reader.ok()) return unread<StoreResponse>("answer", reader, progress);
  progress = {};
  return Decoded<StoreResponse>{
      StoreResponse{.number = parts.number, .values = to_strings(parts.values)}, reader.offset()};
}

}  // namespace

std::string_view to_string(StoreVerb verb) {
  const Shape* shape = find_shape(verb);
  return shape == nullptr ? "unknown" : shape->name;
}

bool is_of_connection(StoreVerb verb) {
  const Shape* shape = find_shape(verb);
  return shape != nullptr && shape->recipient == For::kConnection;
}

Status check_shape(const StoreRequest& request) {
  const Shape* shape = find_shape(request.verb);
  if (shape == nullptr) {
    return Error(ErrorCode::kCorruption,
                 format("store request has the unknown verb {}", static_cast<int>(request.verb)));
  }
  const Counts counts = counts_of(shape->body);
  const size_t num_keys = counts.num_keys == kAnyCount ? request.keys.size() : counts.num_keys;
  const size_t num_values = counts.num_values == kAnyCount ? num_keys : counts.num_values;
  if (request.keys.size() == num_keys && request.values.size() == num_values) return {};
  return Error(ErrorCode::kCorruption,
               format("store request {} has {} keys and {} values, expected {} and {}", shape->name,
                      request.keys.size(), request.values.size(), num_keys, num_values));
}

std::vector<std::byte> encode(const StoreRequest& request) {
  const Body body = find_shape(request.verb)->body;
  ByteWriter writer;
  writer.integer(request.verb);
  if (body == Body::kNumber32) writer.integer(static_cast<uint32_t>(request.amount));
  if (body == Body::kHello) writer.integer(request.amount);
  if (body == Body::kKeys || body == Body::kKeyValues) {
    writer.integer(static_cast<uint64_t>(request.keys.size()));
  }
  for (size_t i = 0; i < request.keys.size(); ++i) {
    writer.text<uint64_t>(request.keys[i]);
    if (body == Body::kKeyValues) writer.text<uint64_t>(request.values[i]);
  }
  if (body == Body::kKeyNumber) writer.integer(request.amount);
  if (body == Body::kKeyValues) return writer.take();
  for (const std::string& value : request.values) writer.text<uint64_t>(value);
  return writer.take();
}

Result<Decoded<StoreRequest>> decode_store_request(ConstBytes stream, Progress& progress) {
  if (stream.size() < progress.num_needed) {
    return Decoded<StoreRequest>{std::nullopt, progress.num_needed};
  }
  ByteReader reader(stream);
  const auto verb = static_cast<StoreVerb>(reader.integer<uint8_t>());
  const Shape* shape = find_shape(verb);
  if (shape == nullptr) {
    return Error(ErrorCode::kCorruption,
                 format("store request has the unknown verb {}", static_cast<int>(verb)));
  }
  Parts parts;
  read_body(reader, shape->body, parts, progress);
  if (!reader.ok()) return unread<StoreRequest>(shape->name, reader, progress);
  progress = {};
  return Decoded<StoreRequest>{StoreRequest{.verb = verb,
                                            .amount = parts.number,
                                            .keys = to_strings(parts.keys),
                                            .values = to_strings(parts.values)},
                               reader.offset()};
}

std::vector<std::byte> encode_c10d_answer(StoreVerb verb, const StoreResponse& response) {
  ByteWriter writer;
  write_answer(writer, find_shape(verb)->answer, response);
  return writer.take();
}

std::vector<std::byte> encode_answer(StoreVerb verb, const StoreResponse& response) {
  ByteWriter writer;
  if (response.error) {
    writer.integer(static_cast<uint8_t>(response.error->code()));
    writer.text<uint64_t>(std::string_view(response.error->message()).substr(0, kMaxErrorBytes));
    return writer.take();
  }
  writer.integer(kNoError);
  write_answer(writer, find_shape(verb)->answer, response);
  return writer.take();
}

Result<Decoded<StoreResponse>> decode_c10d_answer(const StoreRequest& request, ConstBytes stream,
                                                  Progress& progress) {
  if (stream.size() < progress.num_needed) {
    return Decoded<StoreResponse>{std::nullopt, progress.num_needed};
  }
  ByteReader reader(stream);
  return finish_answer(reader, request, progress);
}

Result<Decoded<StoreResponse>> decode_answer(const StoreRequest& request, ConstBytes stream,
                                             Progress& progress) {
  if (stream.size() < progress.num_needed) {
    return Decoded<StoreResponse>{std::nullopt, progress.num_needed};
  }
  ByteReader reader(stream);
  const auto code = reader.integer<uint8_t>();
  if (code > kMaxErrorCode) {
    return Error(ErrorCode::kCorruption, format("store answer has the unknown code {}", code));
  }
  if (code == kNoError) return finish_answer(reader, request, progress);
  const std::string_view message = reader.view<uint64_t>(kMaxErrorBytes);
  if (!reader.ok()) return unread<StoreResponse>("error", reader, progress);
  progress = {};
  return Decoded<StoreResponse>{
      StoreResponse{.error = Error(static_cast<ErrorCode>(code), std::string(message))},
      reader.offset()};
}

}  // namespace cadre::wire
