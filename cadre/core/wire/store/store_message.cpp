#include "cadre/core/wire/store/store_message.h"

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

constexpr int kAnyCount = -1;

// How many keys and values each verb carries; with kAnyCount keys, a value count of kAnyCount means
// as many as keys.
struct RequestShape {
  std::string_view name;
  int num_keys;
  int num_values;
};

constexpr std::array<RequestShape, kNumStoreVerbs> kRequestShapes = {{
    {"set", 1, 1},
    {"get", 1, 0},
    {"add", 1, 0},
    {"wait", kAnyCount, 0},
    {"check", kAnyCount, 0},
    {"compare_set", 1, 2},
    {"erase", 1, 0},
    {"num_keys", 0, 0},
    {"append", 1, 1},
    {"multi_get", kAnyCount, 0},
    {"multi_set", kAnyCount, kAnyCount},
    {"cancel", 0, 0},
    {"queue_push", 1, 1},
    {"queue_pop", 1, 0},
    {"try_queue_pop", 1, 0},
    {"queue_length", 1, 0},
    {"list_keys", 0, 0},
    {"barrier", 1, 0},
    {"leave_will", 1, 1},
    {"retract_will", 0, 0},
}};

void write_texts(ByteWriter& writer, const std::vector<std::string>& texts) {
  writer.integer(static_cast<uint32_t>(texts.size()));
  for (const std::string& text : texts) writer.text(text);
}

std::vector<std::string> read_texts(ByteReader& reader, size_t max_bytes) {
  // Grown as texts are read: an announced count reserves nothing.
  std::vector<std::string> texts;
  const auto count = reader.integer<uint32_t>();
  if (count > kMaxKeysPerRequest) reader.fail();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) texts.push_back(reader.text(max_bytes));
  return texts;
}

Status check_complete(std::string_view what, const ByteReader& reader) {
  if (reader.is_complete()) return {};
  if (!reader.ok()) {
    return Error(ErrorCode::kCorruption,
                 format("{} is malformed at byte {} of {}: {}", what, reader.offset(),
                        reader.offset() + reader.remaining(),
                        reader.is_truncated() ? "it ends too early"
                                              : "a length or count is over its limit"));
  }
  return Error(ErrorCode::kCorruption, format("{} has {} bytes too many after byte {}", what,
                                              reader.remaining(), reader.offset()));
}

constexpr uint8_t kNoError = 0;
constexpr uint8_t kMaxErrorCode = static_cast<uint8_t>(ErrorCode::kInternal) + 1;
constexpr size_t kMaxErrorBytes = 64 << 10;

}  // namespace

std::string_view to_string(StoreVerb verb) {
  return kRequestShapes[static_cast<size_t>(verb)].name;
}

Status check_shape(const StoreRequest& request) {
  const RequestShape& shape = kRequestShapes[static_cast<size_t>(request.verb)];
  const size_t num_keys =
      shape.num_keys == kAnyCount ? request.keys.size() : static_cast<size_t>(shape.num_keys);
  const size_t num_values =
      shape.num_values == kAnyCount ? num_keys : static_cast<size_t>(shape.num_values);
  if (request.keys.size() == num_keys && request.values.size() == num_values) return {};
  return Error(ErrorCode::kCorruption,
               format("store request {} has {} keys and {} values, expected {} and {}", shape.name,
                      request.keys.size(), request.values.size(), num_keys, num_values));
}

std::vector<std::byte> encode(const StoreHello& hello) {
  ByteWriter writer;
  writer.integer(hello.protocol);
  writer.text<uint8_t>(hello.build);
  writer.raw(hello.nonce);
  return writer.take();
}

std::vector<std::byte> encode(const StoreProof& proof) {
  return {proof.digest.begin(), proof.digest.end()};
}

std::vector<std::byte> encode(const StoreRequest& request) {
  ByteWriter writer;
  writer.integer(request.id);
  writer.integer(request.verb);
  writer.integer(request.amount);
  write_texts(writer, request.keys);
  write_texts(writer, request.values);
  return writer.take();
}

std::vector<std::byte> encode(const StoreResponse& response) {
  ByteWriter writer;
  writer.integer(response.id);
  if (response.error) {
    writer.integer(static_cast<uint8_t>(static_cast<int>(response.error->code()) + 1));
    writer.text(std::string_view(response.error->message()).substr(0, kMaxErrorBytes));
    return writer.take();
  }
  writer.integer(kNoError);
  writer.integer(response.number);
  write_texts(writer, response.values);
  return writer.take();
}

Result<StoreHello> decode_store_hello(ConstBytes payload) {
  ByteReader reader(payload);
  StoreHello hello;
  hello.protocol = reader.integer<uint16_t>();
  hello.build = reader.text<uint8_t>(kMaxBuildBytes);
  reader.raw(hello.nonce);
  // A later protocol may say more in its hello; this one has nothing more to say.
  if (reader.ok() && hello.protocol != kStoreProtocol) return hello;
  CADRE_RETURN_IF_ERROR(check_complete("store hello", reader));
  return hello;
}

Result<StoreProof> decode_store_proof(ConstBytes payload) {
  ByteReader reader(payload);
  StoreProof proof;
  reader.raw(proof.digest);
  CADRE_RETURN_IF_ERROR(check_complete("store proof", reader));
  return proof;
}

Result<StoreRequest> decode_store_request(ConstBytes payload) {
  ByteReader reader(payload);
  StoreRequest request;
  request.id = reader.integer<uint64_t>();
  const auto verb = reader.integer<uint8_t>();
  if (verb >= kNumStoreVerbs) {
    return Error(ErrorCode::kCorruption, format("store request has the unknown verb {}", verb));
  }
  request.verb = static_cast<StoreVerb>(verb);
  request.amount = reader.integer<int64_t>();
  request.keys = read_texts(reader, kMaxKeyBytes);
  request.values = read_texts(reader, kMaxValueBytes);
  CADRE_RETURN_IF_ERROR(check_complete("store request", reader));
  CADRE_RETURN_IF_ERROR(check_shape(request));
  return request;
}

Result<StoreResponse> decode_store_response(ConstBytes payload) {
  ByteReader reader(payload);
  StoreResponse response;
  response.id = reader.integer<uint64_t>();
  const auto code = reader.integer<uint8_t>();
  if (code > kMaxErrorCode) {
    return Error(ErrorCode::kCorruption, format("store response has the unknown code {}", code));
  }
  if (code != kNoError) {
    response.error = Error(static_cast<ErrorCode>(code - 1), reader.text(kMaxErrorBytes));
  } else {
    response.number = reader.integer<int64_t>();
    response.values = read_texts(reader, kMaxValueBytes);
  }
  CADRE_RETURN_IF_ERROR(check_complete("store response", reader));
  return response;
}

}  // namespace cadre::wire
