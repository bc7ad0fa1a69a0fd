// The sizes of a tensor in 64 bits, by which ranks that reduce (2, 3) with (3, 2) are found.
//
// Threads: a plain value. Blocking: never. Errors: none; bits that a peer made up read as some
// shape.
// Sizes are packed, not hashed, so that every rank can name the shape of any other. Only those that
// need more than 60 bits, at 4 bits for each 3 of a size, are told by a digest.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/core/base/export.h"

namespace cadre {

class CADRE_EXPORT PackedShape {
 public:
  // One dimension, as of a plain buffer: the number of elements says all.
  PackedShape() = default;
  explicit PackedShape(std::span<const int64_t> sizes);
  static PackedShape from_bits(uint64_t bits);

  // Low to high: 4 bits, 0 for one dimension, 15 for a digest, else the dimensions plus 1; then
  // each size from its low bits on, 3 bits at a time, each below a bit that says whether more of
  // this size follow.
  uint64_t bits() const { return bits_; }
  // Behind the dtype of that many elements: "x 6", "x [2, 3]", "x []" of a number without
  // dimensions, "x 6, shape #1f2e3d" for a digest.
  std::string to_string(uint64_t num_elements) const;

  friend bool operator==(const PackedShape&, const PackedShape&) = default;

 private:
  uint64_t bits_ = 0;
};

}  // namespace cadre
