#include "cadre/testing/core/reference_reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cadre/core/base/random.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/testing/core/seeds.h"

namespace cadre::testing {
namespace {

// A 16-bit floating-point type, implemented as a table of all of its non-negative numbers.
class Half {
 public:
  explicit Half(int num_mantissa_bits) {
    const int num_exponent_bits = 15 - num_mantissa_bits;
    const int bias = (1 << (num_exponent_bits - 1)) - 1;
    const int infinite = ((1 << num_exponent_bits) - 1) << num_mantissa_bits;
    // The last entry, at the code of infinity, is the finite number that would follow the largest
    // one, because rounding to infinity must compare with it.
    for (int code = 0; code <= infinite; ++code) {
      const int exponent = code >> num_mantissa_bits;
      const int hidden = exponent == 0 ? 0 : 1 << num_mantissa_bits;
      const int mantissa = (code & ((1 << num_mantissa_bits) - 1)) + hidden;
      numbers_.push_back(std::ldexp(mantissa, std::max(exponent, 1) - bias - num_mantissa_bits));
    }
    quiet_nan_ = static_cast<uint16_t>(infinite + (1 << (num_mantissa_bits - 1)));
  }

  float decode(uint16_t code) const {
    const size_t magnitude = code & 0x7fffU;
    const size_t infinite = numbers_.size() - 1;
    double value = std::numeric_limits<double>::quiet_NaN();
    if (magnitude < infinite) value = numbers_[magnitude];
    if (magnitude == infinite) value = std::numeric_limits<double>::infinity();
    return static_cast<float>((code & 0x8000U) != 0 ? -value : value);
  }

  // Returns the code of the nearest number, by exact distance. Of two equally near numbers it
  // chooses the one with the even code (round to nearest even).
  uint16_t encode(float value) const {
    if (std::isnan(value)) return quiet_nan_;
    const double magnitude = std::abs(static_cast<double>(value));
    const auto above = std::upper_bound(numbers_.begin(), numbers_.end(), magnitude);
    auto code = static_cast<uint16_t>(above - numbers_.begin() - 1);
    if (above != numbers_.end()) {
      const double to_above = *above - magnitude;
      const double to_below = magnitude - numbers_[code];
      if (to_above < to_below || (to_above == to_below && code % 2 == 1)) ++code;
    }
    return static_cast<uint16_t>(code | (std::signbit(value) ? 0x8000U : 0U));
  }

 private:
  std::vector<double> numbers_;
  uint16_t quiet_nan_ = 0;
};

const Half& half_of(DType dtype) {
  static const Half kFloat16(10);
  static const Half kBfloat16(7);
  return dtype == DType::kFloat16 ? kFloat16 : kBfloat16;
}

template <typename T>
T fold_two_floats(T total, T next, ReduceOp op) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    const bool keep = op == ReduceOp::kMin ? total < next : total > next;
    return keep || std::isnan(total) ? total : next;
  }
  return op == ReduceOp::kProduct ? total * next : total + next;
}

// Reduces one element of all inputs in rank order. value(r) returns the element of rank r's input.
template <typename T, typename Value>
T fold_floats(size_t num_inputs, ReduceOp op, const Value& value) {
  T total = value(0);
  for (size_t r = 1; r < num_inputs; ++r) total = fold_two_floats<T>(total, value(r), op);
  return op == ReduceOp::kAvg ? total / static_cast<T>(num_inputs) : total;
}

template <typename T>
void reduce_floats(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    const auto value = [&](size_t r) { return read_element<T>(inputs[r], i); };
    write_element(out, i, fold_floats<T>(inputs.size(), op, value));
  }
}

void reduce_halves(const Inputs& inputs, ReduceKind kind, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(uint16_t); ++i) {
    const auto value = [&](size_t r) {
      return from_half(read_element<uint16_t>(inputs[r], i), kind.dtype);
    };
    const auto total = fold_floats<float>(inputs.size(), kind.op, value);
    write_element(out, i, to_half(total, kind.dtype));
  }
}

template <typename T>
T fold_two_integers(T total, T next, ReduceOp op) {
  const auto a = static_cast<uint64_t>(total);
  const auto b = static_cast<uint64_t>(next);
  switch (op) {
    case ReduceOp::kMin:
      return std::min(total, next);
    case ReduceOp::kMax:
      return std::max(total, next);
    case ReduceOp::kProduct:
      return static_cast<T>(a * b);
    case ReduceOp::kBand:
      return static_cast<T>(a & b);
    case ReduceOp::kBor:
      return static_cast<T>(a | b);
    case ReduceOp::kBxor:
      return static_cast<T>(a ^ b);
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      break;
  }
  return static_cast<T>(a + b);
}

template <typename T>
void reduce_integers(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T total = read_element<T>(inputs[0], i);
    for (size_t r = 1; r < inputs.size(); ++r) {
      total = fold_two_integers<T>(total, read_element<T>(inputs[r], i), op);
    }
    write_element(out, i, total);
  }
}

// Counts the inputs that are true: AND requires all, OR at least one, XOR an odd number.
void reduce_bools(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const auto is_true = [i](const auto& input) { return input[i] != std::byte{0}; };
    const auto num_true = static_cast<size_t>(std::ranges::count_if(inputs, is_true));
    bool result = num_true > 0;
    if (op == ReduceOp::kMin || op == ReduceOp::kProduct || op == ReduceOp::kBand) {
      result = num_true == inputs.size();
    }
    if (op == ReduceOp::kBxor) result = num_true % 2 == 1;
    out[i] = std::byte{result};
  }
}

double random_number(DType dtype, Random& random) {
  // Exponents of two are chosen at random; those of float16 have a smaller range.
  const int num_exponents = dtype == DType::kFloat16 ? 24 : 40;
  const auto exponent = static_cast<int>(random.below(static_cast<uint64_t>(num_exponents)));
  return std::ldexp(random.unit() - 0.5, exponent - num_exponents / 2);
}

void fill(std::vector<std::byte>& bytes, size_t count, DType dtype, Random& random) {
  for (size_t i = 0; i < count; ++i) {
    switch (dtype) {
      case DType::kFloat32:
      case DType::kFloat64:
      case DType::kFloat16:
      case DType::kBfloat16:
        write_number(bytes, i, dtype, random_number(dtype, random));
        break;
      case DType::kBool:
        bytes[i] = static_cast<std::byte>(random.below(2));
        break;
      case DType::kUint8:
      case DType::kInt8:
      case DType::kInt16:
      case DType::kInt32:
      case DType::kInt64: {
        const uint64_t bits = random.next();
        std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
        break;
      }
    }
  }
}

}  // namespace

uint16_t to_half(float value, DType dtype) {
  return half_of(dtype).encode(value);
}

float from_half(uint16_t code, DType dtype) {
  return half_of(dtype).decode(code);
}

void write_number(std::vector<std::byte>& bytes, size_t i, DType dtype, double value) {
  switch (dtype) {
    case DType::kUint8:
      return write_element(bytes, i, static_cast<uint8_t>(static_cast<int64_t>(value)));
    case DType::kInt8:
      return write_element(bytes, i, static_cast<int8_t>(static_cast<int64_t>(value)));
    case DType::kInt16:
      return write_element(bytes, i, static_cast<int16_t>(static_cast<int64_t>(value)));
    case DType::kInt32:
      return write_element(bytes, i, static_cast<int32_t>(value));
    case DType::kInt64:
      return write_element(bytes, i, static_cast<int64_t>(value));
    case DType::kBool:
      return write_element(bytes, i, static_cast<uint8_t>(value != 0));
    case DType::kFloat16:
    case DType::kBfloat16:
      return write_element(bytes, i, to_half(static_cast<float>(value), dtype));
    case DType::kFloat32:
      return write_element(bytes, i, static_cast<float>(value));
    case DType::kFloat64:
      return write_element(bytes, i, value);
  }
}

std::vector<std::byte> reference_reduction(const Inputs& inputs, ReduceKind kind) {
  if (inputs.size() == 1) return inputs[0];
  std::vector<std::byte> out(inputs[0].size());
  switch (kind.dtype) {
    case DType::kUint8:
      reduce_integers<uint8_t>(inputs, kind.op, out);
      break;
    case DType::kInt8:
      reduce_integers<int8_t>(inputs, kind.op, out);
      break;
    case DType::kInt16:
      reduce_integers<int16_t>(inputs, kind.op, out);
      break;
    case DType::kInt32:
      reduce_integers<int32_t>(inputs, kind.op, out);
      break;
    case DType::kInt64:
      reduce_integers<int64_t>(inputs, kind.op, out);
      break;
    case DType::kBool:
      reduce_bools(inputs, kind.op, out);
      break;
    case DType::kFloat16:
    case DType::kBfloat16:
      reduce_halves(inputs, kind, out);
      break;
    case DType::kFloat32:
      reduce_floats<float>(inputs, kind.op, out);
      break;
    case DType::kFloat64:
      reduce_floats<double>(inputs, kind.op, out);
      break;
  }
  return out;
}

std::vector<std::byte> reference_scaling(const std::vector<std::byte>& input, DType dtype,
                                         double factor) {
  std::vector<std::byte> out(input.size());
  for (size_t i = 0; i < input.size() / size_of(dtype); ++i) {
    if (dtype == DType::kFloat64) {
      write_element(out, i, read_element<double>(input, i) * factor);
      continue;
    }
    const float value = dtype == DType::kFloat32
                            ? read_element<float>(input, i)
                            : from_half(read_element<uint16_t>(input, i), dtype);
    write_number(out, i, dtype, value * static_cast<float>(factor));
  }
  return out;
}

Inputs random_inputs(size_t num_inputs, size_t count, DType dtype, uint64_t seed) {
  Random random(seed);
  Inputs inputs(num_inputs, std::vector<std::byte>(count * size_of(dtype)));
  for (auto& input : inputs) fill(input, count, dtype, random);
  return inputs;
}

std::vector<ReduceKind> all_reduce_kinds() {
  std::vector<ReduceKind> kinds;
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      const ReduceKind kind{static_cast<DType>(dtype), static_cast<ReduceOp>(op)};
      if (kind.op == ReduceOp::kPremulSum) continue;  // engines get PREMUL_SUM as SUM
      if (is_supported(kind.dtype, kind.op)) kinds.push_back(kind);
    }
  }
  return kinds;
}

std::vector<ReduceKind> reduce_kinds_in(int world_size) {
  const std::vector<ReduceKind> all = all_reduce_kinds();
  std::vector<ReduceKind> kinds;
  for (size_t i = static_cast<size_t>(world_size) % 3; i < all.size(); i += 3) {
    kinds.push_back(all[i]);
  }
  return share_of(kinds);
}

}  // namespace cadre::testing
