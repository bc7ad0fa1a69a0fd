// Checks that parse_safetensors_header() returns for all inputs. A header that it returns must be
// equal after encoding and parsing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/safetensors_header.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const cadre::ConstBytes bytes = std::as_bytes(std::span(data, num_bytes));
  const auto header = cadre::wire::parse_safetensors_header(bytes, num_bytes);
  if (!header.ok()) return 0;

  const std::string encoded = cadre::wire::encode_safetensors_header(*header);
  const uint64_t data_bytes = num_bytes - header->data_offset;
  const auto again = cadre::wire::parse_safetensors_header(std::as_bytes(std::span(encoded)),
                                                           encoded.size() + data_bytes);
  if (!again.ok() || again->tensors != header->tensors || again->metadata != header->metadata) {
    std::abort();
  }
  return 0;
}

namespace {

// Returns a small valid file as a start for mutations, because random bytes almost never become
// JSON with the right keys.
std::string sample() {
  const cadre::wire::SafetensorsHeader header{
      .tensors = {{"bias", "F32", {2}, 0, 8}, {"weight", "I64", {1, 2}, 8, 24}},
      .metadata = {{"format", "pt"}}};
  return cadre::wire::encode_safetensors_header(header) + std::string(24, 'd');
}

}  // namespace

// One call in 32 returns a valid file. The others mutate the input, and half of them then correct
// the length word, so that the JSON is parsed.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  using cadre::wire::kSafetensorsLengthBytes;
  const std::string fresh = sample();
  if ((seed % 32 == 0 || size < kSafetensorsLengthBytes) && fresh.size() <= max_size) {
    std::memcpy(data, fresh.data(), fresh.size());
    return fresh.size();
  }
  size = LLVMFuzzerMutate(data, size, max_size);
  const std::span bytes(data, size);
  const auto brace = std::find(bytes.rbegin(), bytes.rend(), '}');
  const size_t end = size - static_cast<size_t>(brace - bytes.rbegin());
  if (seed % 2 == 0 && end > kSafetensorsLengthBytes) {
    cadre::wire::ByteWriter length;
    length.integer(static_cast<uint64_t>(end - kSafetensorsLengthBytes));
    std::memcpy(data, length.bytes().data(), kSafetensorsLengthBytes);
  }
  return size;
}
