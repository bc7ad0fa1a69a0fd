// The arithmetic of NCCL on one element of each type, for the fake NCCL: float16 and bfloat16 are
// rounded after each operation, and a minimum or maximum ignores a NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cadre::testing::fake_nccl {

// bfloat16 as its bits.
struct Bfloat16 {
  uint16_t bits = 0;

  Bfloat16() = default;
  explicit Bfloat16(double value) {
    const auto word = std::bit_cast<uint32_t>(static_cast<float>(value));
    if (std::isnan(value)) {
      bits = 0x7fc0;
    } else {
      bits = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
  }
  explicit operator double() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

using Float16 = _Float16;

// Integers wrap, and other types are computed in double, or in float64 itself, and rounded.
template <typename T>
T multiplied(T value, double factor) {
  return T(static_cast<double>(value) * static_cast<double>(T(factor)));
}

enum class Operation { kSum, kProduct, kMax, kMin };

template <typename T>
T combined(Operation operation, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::make_unsigned_t<T>;
    switch (operation) {
      case Operation::kSum:
        return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
      case Operation::kProduct:
        return static_cast<T>(uint64_t{static_cast<Wide>(a)} * uint64_t{static_cast<Wide>(b)});
      case Operation::kMax:
        return std::max(a, b);
      case Operation::kMin:
        break;
    }
    return std::min(a, b);
  } else {
    const auto x = static_cast<double>(a);
    const auto y = static_cast<double>(b);
    switch (operation) {
      case Operation::kSum:
        return T(x + y);
      case Operation::kProduct:
        return T(x * y);
      case Operation::kMax:
        return T(std::fmax(x, y));
      case Operation::kMin:
        break;
    }
    return T(std::fmin(x, y));
  }
}

}  // namespace cadre::testing::fake_nccl
