// Fuzzes c10d's store protocol, both directions. Whatever is accepted must encode to the same
// bytes; a message that is not whole must ask for more than it has, and get on with what it asked
// for.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/c10d_message.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace cadre::wire {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

template <typename T>
bool check_decoded(const Result<Decoded<T>>& decoded, ConstBytes stream) {
  if (!decoded.ok()) {
    require(decoded.error().code() == ErrorCode::kCorruption);
    return false;
  }
  if (decoded->message) {
    require(decoded->num_bytes <= stream.size());
  } else {
    require(decoded->num_bytes > stream.size() && decoded->num_bytes <= kMaxC10dRequestBytes);
  }
  return decoded->message.has_value();
}

void read_requests(ConstBytes stream) {
  while (!stream.empty()) {
    const auto decoded = decode_c10d_request(stream);
    if (!check_decoded(decoded, stream)) return;
    const ConstBytes bytes = stream.first(decoded->num_bytes);
    require(as_text(encode(*decoded->message)) == as_text(bytes));
    // Every part of a whole request is recognised as a part of it.
    const auto cut = decode_c10d_request(bytes.first(bytes.size() - 1));
    require(cut.ok() && !cut->message);
    stream = stream.subspan(decoded->num_bytes);
  }
}

// What was decoded encodes to the bytes it came from.
template <typename T, typename Encode>
void expect_same_bytes(const Result<Decoded<T>>& decoded, ConstBytes stream, Encode encode_answer) {
  if (!check_decoded(decoded, stream)) return;
  const std::vector<std::byte> again = encode_answer(*decoded->message);
  require(as_text(again) == as_text(stream.first(decoded->num_bytes)));
}

void read_answers(ConstBytes stream) {
  expect_same_bytes(decode_c10d_byte(stream), stream, encode_c10d_byte);
  expect_same_bytes(decode_c10d_nonce(stream), stream, encode_c10d_nonce);
  expect_same_bytes(decode_c10d_number(stream), stream, encode_c10d_number);
  for (size_t count = 0; count < 4; ++count) {
    expect_same_bytes(decode_c10d_values(stream, count), stream,
                      [&](const std::vector<std::string>& values) {
                        require(values.size() == count);
                        std::vector<std::byte> all;
                        for (const std::string& value : values) {
                          const std::vector<std::byte> one = encode_c10d_value(value);
                          all.insert(all.end(), one.begin(), one.end());
                        }
                        return all;
                      });
  }
}

std::vector<std::byte> sample(unsigned seed) {
  const auto verb = static_cast<C10dVerb>(seed % kNumC10dVerbs);
  C10dRequest request{.verb = verb, .number = 3};
  switch (verb) {
    case C10dVerb::kNumKeys:
    case C10dVerb::kCancelWait:
    case C10dVerb::kListKeys:
    case C10dVerb::kPing:
    case C10dVerb::kValidate:
      break;
    case C10dVerb::kSet:
    case C10dVerb::kAppend:
    case C10dVerb::kQueuePush:
      request.keys = {"/k"};
      request.values = {"value"};
      break;
    case C10dVerb::kCompareSet:
      request.keys = {"/k"};
      request.values = {"", "new"};
      break;
    case C10dVerb::kMultiSet:
      request.keys = {"/a", "/b"};
      request.values = {"1", "2"};
      break;
    default:
      request.keys = {"/k"};
      break;
  }
  return encode(request);
}

}  // namespace
}  // namespace cadre::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  cadre::wire::read_requests(input);
  cadre::wire::read_answers(input);
  return 0;
}

// Now and then appends a good request to the input; else mutates it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 16 != 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::vector<std::byte> fresh = cadre::wire::sample(seed / 16);
  if (fresh.size() > max_size - size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data + size, fresh.data(), fresh.size());
  return size + fresh.size();
}
