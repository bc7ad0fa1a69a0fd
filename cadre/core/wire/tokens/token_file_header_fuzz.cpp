// Checks that parse_token_file_header() returns for all inputs, and that a header that it returns
// is equal after encoding and parsing.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "cadre/core/wire/tokens/token_file_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  uint64_t file_bytes = 0;
  if (num_bytes < sizeof(file_bytes)) return 0;
  std::memcpy(&file_bytes, data, sizeof(file_bytes));
  const auto begin = std::as_bytes(std::span(data, num_bytes)).subspan(sizeof(file_bytes));
  const auto header = cadre::wire::parse_token_file_header(begin, file_bytes);
  if (!header.ok()) return 0;
  const auto again = cadre::wire::parse_token_file_header(
      cadre::wire::encode_token_file_header(*header), file_bytes);
  if (!again.ok() || *again != *header) std::abort();
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// One call in four replaces the input by a valid header; the others mutate it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  const cadre::wire::TokenFileHeader header = {.num_tokens = static_cast<int64_t>(seed % 1000),
                                               .bytes_per_token = seed % 8 < 4 ? 2 : 4};
  const auto bytes = cadre::wire::encode_token_file_header(header);
  if (seed % 4 != 0 || bytes.size() + sizeof(uint64_t) > max_size) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const uint64_t file_bytes =
      bytes.size() + static_cast<uint64_t>(header.num_tokens * header.bytes_per_token);
  std::memcpy(data, &file_bytes, sizeof(file_bytes));
  std::memcpy(data + sizeof(file_bytes), bytes.data(), bytes.size());
  return bytes.size() + sizeof(file_bytes);
}
