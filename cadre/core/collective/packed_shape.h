// The sizes of a tensor in 64 bits. Ranks compare these bits, to detect for example that one rank
// passes a (2, 3) tensor and another a (3, 2) tensor to the same collective.
//
// Threads: a plain value. Blocking: never. Errors: none; arbitrary bits from a peer are read as
// some shape.
// Sizes are packed, not hashed, so that every rank can name the shape of any other. Only sizes that
// need more than 60 bits, at 4 bits for each 3 bits of a size, are replaced by a digest.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/core/base/export.h"

namespace cadre {

class CADRE_EXPORT PackedShape {
 public:
  // One dimension, like a plain buffer; its size is the number of elements.
  PackedShape() = default;
  explicit PackedShape(std::span<const int64_t> sizes);
  static PackedShape from_bits(uint64_t bits);

  // Returns the bits, from low to high: 4 bits, which are 0 for one dimension, 15 for a digest,
  // else the number of dimensions plus 1. Then each size follows from its low bits on, 3 bits at a
  // time; a fourth bit above them says whether more of this size follow.
  uint64_t bits() const { return bits_; }
  // Returns the text that follows the dtype: "x 6", "x [2, 3]", "x []" for a number without
  // dimensions, "x 6, shape #1f2e3d" for a digest.
  std::string to_string(uint64_t num_elements) const;

  friend bool operator==(const PackedShape&, const PackedShape&) = default;

 private:
  uint64_t bits_ = 0;
};

}  // namespace cadre
