#include "cadre/train/data/samplers/keyed_permutation.h"

#include <cmath>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

KeyedPermutation::KeyedPermutation(int64_t size, uint64_t key) : size_(size) {
  if (size < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("KeyedPermutation: the size is {}; expected 0 or more", size));
  }
  const auto count = static_cast<uint64_t>(size);
  // A rounding error of sqrt() changes the shape of the network, but never what it covers.
  rows_ = static_cast<uint64_t>(std::sqrt(static_cast<double>(count))) + 1;
  columns_ = count / rows_ + 1;
  Random keys = keyed_random(key, count, 0);
  for (uint64_t& round_key : keys_) round_key = keys.next();
}

int64_t KeyedPermutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  // Each round adds to one half a number that depends only on the other half, so it is a bijection
  // of the network's domain. A value outside of [0, size) is permuted again: following the cycle
  // from an element below the size reaches such an element, at the latest itself.
  do {
    uint64_t row = value / columns_;
    uint64_t column = value % columns_;
    for (size_t round = 0; round < kNumRounds; ++round) {
      if (round % 2 == 0) {
        row += Random(keys_[round] ^ column).below(rows_);
        if (row >= rows_) row -= rows_;
      } else {
        column += Random(keys_[round] ^ row).below(columns_);
        if (column >= columns_) column -= columns_;
      }
    }
    value = row * columns_ + column;
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace cadre
