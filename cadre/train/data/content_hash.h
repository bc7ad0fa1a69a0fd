// A fast hash of bytes. By comparing it, ranks and runs notice that their data differ. It does not
// protect against forgery.
//
// Threads: plain values and pure functions. Blocking: never. Errors: none.
// Source: XXH64 of the xxHash specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): four
// independent lanes of 8 bytes, so that it reads about as fast as memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

// Hashes bytes that are added part by part; the result does not depend on how they are divided.
class CADRE_EXPORT ContentHash {
 public:
  ContentHash();

  void add(std::string_view bytes);
  uint64_t value() const;  // Returns the hash of the bytes so far.

 private:
  static constexpr size_t kStripeBytes = 32;

  void add_stripe(const char* stripe);

  std::array<uint64_t, 4> lanes_;
  // The bytes after the last complete stripe. Only the first num_bytes_ % kStripeBytes elements are
  // used.
  std::array<char, kStripeBytes> rest_{};
  uint64_t num_bytes_ = 0;
};

CADRE_EXPORT uint64_t content_hash(std::string_view bytes);

}  // namespace cadre
