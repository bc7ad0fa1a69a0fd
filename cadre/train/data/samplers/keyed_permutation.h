// A permutation of the integers below a size, chosen by a key, in constant memory.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument for a negative size. The same
// key and size give the same permutation on every platform. Source: Black and Rogaway, "Ciphers
// with arbitrary finite domains", 2002: a Feistel network over Z_a x Z_b, and cycle walking.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/base/random.h"

namespace cadre {

// Returns a generator for one purpose: equal numbers give equal generators, on every platform.
inline Random keyed_random(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t of_stream = Random(Random(seed).next() ^ stream).next();
  return Random(Random(of_stream ^ index).next());
}

class CADRE_EXPORT KeyedPermutation {
 public:
  KeyedPermutation(int64_t size, uint64_t key);

  int64_t size() const { return size_; }
  // Returns the image of `index`. REQUIRES: `index` is in [0, size()). Costs about 30 ns.
  int64_t operator()(int64_t index) const;

 private:
  static constexpr size_t kNumRounds = 8;

  int64_t size_;
  // The network permutes [0, rows_ * columns_), which has at most sqrt(size) + 1 more elements.
  uint64_t rows_ = 1;
  uint64_t columns_ = 1;
  std::array<uint64_t, kNumRounds> keys_{};
};

}  // namespace cadre
