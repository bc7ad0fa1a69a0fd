// Checks that parse_idx() returns for all inputs, plain or compressed by gzip. An array that it
// returns must be equal after encoding and parsing.
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "cadre/core/wire/idx_file.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

std::vector<uint8_t> gzip(std::span<const uint8_t> plain) {
  z_stream stream = {};
  if (deflateInit2(&stream, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK) std::abort();
  std::vector<uint8_t> packed(deflateBound(&stream, plain.size()));
  std::vector<uint8_t> input(plain.begin(), plain.end());
  stream.next_in = input.data();
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = packed.data();
  stream.avail_out = static_cast<uInt>(packed.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) std::abort();
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const auto array = cadre::parse_idx(std::as_bytes(std::span(data, num_bytes)));
  if (!array.ok()) return 0;
  const auto again = cadre::parse_idx(cadre::encode_idx(*array));
  if (!again.ok() || *again != *array) std::abort();
  return 0;
}

// One call in 32 replaces the input by a valid file; the others mutate it. Compresses every fourth
// result with gzip.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 32 == 0) {
    const auto fresh = cadre::encode_idx({.shape = {2, 3}, .elements = {1, 2, 3, 4, 5, 6}});
    if (fresh.size() > max_size) return size;
    std::memcpy(data, fresh.data(), fresh.size());
    size = fresh.size();
  } else {
    size = LLVMFuzzerMutate(data, size, max_size);
  }
  if (seed % 4 != 0) return size;
  const std::vector<uint8_t> packed = gzip({data, size});
  if (packed.size() > max_size) return size;
  std::memcpy(data, packed.data(), packed.size());
  return packed.size();
}
