// Fuzzes the decoders of requests and of answers of the store. Every message that is accepted must
// encode to the same bytes. For an incomplete message a decoder must ask for more bytes than there
// are, and the next call must make progress with these bytes.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace cadre::wire {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

StoreVerb verb_of(unsigned number) {
  number %= kNumC10dVerbs + kNumOwnVerbs;
  if (number < kNumC10dVerbs) return static_cast<StoreVerb>(number);
  return static_cast<StoreVerb>(static_cast<unsigned>(StoreVerb::kHello) + number - kNumC10dVerbs);
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
    require(decoded->num_bytes > stream.size() && decoded->num_bytes <= kMaxMessageBytes);
  }
  return decoded->message.has_value();
}

void read_requests(ConstBytes stream) {
  while (!stream.empty()) {
    Progress progress;
    const auto decoded = decode_store_request(stream, progress);
    if (!check_decoded(decoded, stream)) return;
    require(check_shape(*decoded->message).ok());
    const ConstBytes bytes = stream.first(decoded->num_bytes);
    require(as_text(encode(*decoded->message)) == as_text(bytes));
    // Two prefixes of the complete request must be recognised as incomplete. Decoding the complete
    // request then continues from there.
    for (const size_t length : {bytes.size() / 2, bytes.size() - 1}) {
      const auto cut = decode_store_request(bytes.first(length), progress);
      require(cut.ok() && !cut->message);
    }
    const auto again = decode_store_request(bytes, progress);
    require(again.ok() && again->message == decoded->message);
    stream = stream.subspan(decoded->num_bytes);
  }
}

void read_answers(ConstBytes stream) {
  for (unsigned i = 0; i < kNumC10dVerbs + kNumOwnVerbs; ++i) {
    const StoreRequest request{.verb = verb_of(i),
                               .keys = std::vector<std::string>(stream.size() % 4)};
    Progress progress;
    const auto plain = decode_c10d_answer(request, stream, progress);
    if (check_decoded(plain, stream)) {
      require(as_text(encode_c10d_answer(request.verb, *plain->message)) ==
              as_text(stream.first(plain->num_bytes)));
    }
    progress = {};
    const auto answer = decode_answer(request, stream, progress);
    if (check_decoded(answer, stream)) {
      require(as_text(encode_answer(request.verb, *answer->message)) ==
              as_text(stream.first(answer->num_bytes)));
    }
  }
}

// Returns a valid request to append to the input, because random bytes rarely pass the checks of
// counts and lengths.
std::vector<std::byte> sample(unsigned seed) {
  StoreRequest request{.verb = verb_of(seed), .amount = 3};
  const std::vector<std::string> texts = {"/a", "value", "new"};
  for (size_t num_keys = 0; num_keys <= 2; ++num_keys) {
    for (size_t num_values = 0; num_values <= 2; ++num_values) {
      request.keys.assign(texts.begin(), texts.begin() + static_cast<std::ptrdiff_t>(num_keys));
      request.values.assign(texts.end() - static_cast<std::ptrdiff_t>(num_values), texts.end());
      if (check_shape(request).ok()) return encode(request);
    }
  }
  return {};
}

}  // namespace
}  // namespace cadre::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  cadre::wire::read_requests(input);
  cadre::wire::read_answers(input);
  return 0;
}

// One call in 16 appends a valid request to the input; the others mutate the input.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 16 != 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::vector<std::byte> fresh = cadre::wire::sample(seed / 16);
  if (fresh.size() > max_size - size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data + size, fresh.data(), fresh.size());
  return size + fresh.size();
}
