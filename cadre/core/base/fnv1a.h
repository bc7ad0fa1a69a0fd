// The 64-bit FNV-1a hash. It detects accidental differences, but does not protect against forgery.
//
// Threads: a plain value. Blocking: never. Errors: none.
// Source: Fowler, Noll and Vo, draft-eastlake-fnv.
#pragma once

#include <cstdint>
#include <string_view>

namespace cadre {

class Fnv1a {
 public:
  // Hashes one item. A number wider than a byte counts as one item, and is not split into bytes.
  constexpr void add(uint64_t item) { value_ = (value_ ^ item) * 0x100000001b3; }
  constexpr void add(std::string_view bytes) {
    for (const char byte : bytes) add(static_cast<unsigned char>(byte));
  }

  constexpr uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

constexpr uint64_t fnv1a(std::string_view bytes) {
  Fnv1a hash;
  hash.add(bytes);
  return hash.value();
}

}  // namespace cadre
