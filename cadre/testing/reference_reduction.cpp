#include "cadre/testing/reference_reduction.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cadre/base/random.h"

namespace cadre::testing {
namespace {

float widen(uint16_t half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

// The nearer of the two bfloat16 neighbours by exact distance; of two equally near, the even one.
uint16_t narrow(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const auto below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  if (widen(below) == value) return below;
  const auto above = static_cast<uint16_t>(below + 1);
  // The neighbour past the largest finite value counts as 2^128, which rounds to infinity.
  const double far = std::isinf(widen(above)) ? std::copysign(0x1p128, value) : widen(above);
  const double to_below = std::abs(static_cast<double>(value) - widen(below));
  const double to_above = std::abs(far - static_cast<double>(value));
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below % 2 == 0 ? below : above;
}

// `value(r)` is the element of input r.
template <typename T, typename Value>
T fold_floats(size_t num_inputs, ReduceOp op, const Value& value) {
  T total = value(0);
  for (size_t r = 1; r < num_inputs; ++r) {
    const T next = value(r);
    if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
      const bool keep = op == ReduceOp::kMin ? total < next : total > next;
      if (!keep && !std::isnan(total)) total = next;
    } else {
      total = total + next;
    }
  }
  return op == ReduceOp::kAvg ? total / static_cast<T>(num_inputs) : total;
}

template <typename T>
void reduce_floats(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    const auto value = [&](size_t r) { return read_element<T>(inputs[r], i); };
    write_element(out, i, fold_floats<T>(inputs.size(), op, value));
  }
}

void reduce_bfloat16(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(uint16_t); ++i) {
    const auto value = [&](size_t r) { return widen(read_element<uint16_t>(inputs[r], i)); };
    write_element(out, i, narrow(fold_floats<float>(inputs.size(), op, value)));
  }
}

template <typename T>
void reduce_integers(const Inputs& inputs, ReduceOp op, std::vector<std::byte>& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T total = read_element<T>(inputs[0], i);
    for (size_t r = 1; r < inputs.size(); ++r) {
      const T next = read_element<T>(inputs[r], i);
      if (op == ReduceOp::kMin) total = std::min(total, next);
      if (op == ReduceOp::kMax) total = std::max(total, next);
      if (op == ReduceOp::kSum) {
        total = static_cast<T>(static_cast<uint64_t>(total) + static_cast<uint64_t>(next));
      }
    }
    write_element(out, i, total);
  }
}

void fill(std::vector<std::byte>& bytes, size_t count, DType dtype, Random& random) {
  for (size_t i = 0; i < count; ++i) {
    const double value = std::ldexp(random.unit() - 0.5, static_cast<int>(random.below(40)) - 20);
    switch (dtype) {
      case DType::kFloat32:
        write_element(bytes, i, static_cast<float>(value));
        break;
      case DType::kFloat64:
        write_element(bytes, i, value);
        break;
      case DType::kBfloat16:
        write_element(bytes, i, narrow(static_cast<float>(value)));
        break;
      case DType::kUint8:
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

std::vector<std::byte> reference_reduction(const Inputs& inputs, ReduceKind kind) {
  std::vector<std::byte> out(inputs[0].size());
  switch (kind.dtype) {
    case DType::kUint8:
      reduce_integers<uint8_t>(inputs, kind.op, out);
      break;
    case DType::kInt32:
      reduce_integers<int32_t>(inputs, kind.op, out);
      break;
    case DType::kInt64:
      reduce_integers<int64_t>(inputs, kind.op, out);
      break;
    case DType::kBfloat16:
      reduce_bfloat16(inputs, kind.op, out);
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
      if (is_supported(kind.dtype, kind.op)) kinds.push_back(kind);
    }
  }
  return kinds;
}

}  // namespace cadre::testing
