#include "cases.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/reference_reduction.h"
#include "collectives.h"

namespace cadre::conformance {
namespace {

// The largest number of elements of a case. With it an operation takes several chunks in shared
// memory, and over TCP the algorithms for large data are used.
constexpr uint64_t kLargeCount = 70'001;

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// Returns a number from -128 to 256, which every dtype represents exactly; sums and products wrap
// around only for uint8. For the bitwise operations, all bits of the integer vary.
int64_t number_of(const Case& c, Rank rank, int world_size, uint64_t index) {
  const uint64_t mixed = static_cast<uint64_t>(rank.value) * 5 + index * 3 + index / 7;
  if (c.dtype == DType::kBool) return mixed % 4 < 2 ? 1 : 0;
  if (is_bitwise(c.op)) return static_cast<int64_t>(mixed * 0x9e3779b97f4a7c15ULL);
  switch (c.op) {
    case ReduceOp::kAvg:
      return world_size * static_cast<int64_t>(mixed % 3);
    case ReduceOp::kProduct:
      return std::array<int64_t, 3>{1, -1, 2}[mixed % 3];
    case ReduceOp::kPremulSum:
      return 2 * static_cast<int64_t>(mixed % 5);
    default:
      return static_cast<int64_t>(mixed % 11) - (c.dtype == DType::kUint8 ? 0 : 3);
  }
}

int64_t reduce_bools(ReduceOp op, const std::vector<int64_t>& values) {
  const auto num_true = std::ranges::count(values, 1);
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kProduct:
    case ReduceOp::kBand:
      return num_true == std::ssize(values) ? 1 : 0;
    case ReduceOp::kBxor:
      return num_true % 2;
    default:
      return num_true > 0 ? 1 : 0;
  }
}

int64_t reduce_numbers(ReduceOp op, const std::vector<int64_t>& values) {
  int64_t sum = 0;
  int64_t scaled_sum = 0;
  int64_t product = 1;
  uint64_t all = ~uint64_t{0};
  uint64_t any = 0;
  uint64_t odd = 0;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const auto bits = static_cast<uint64_t>(values[rank]);
    all &= bits;
    any |= bits;
    odd ^= bits;
    if (is_bitwise(op)) continue;
    sum += values[rank];
    scaled_sum +=
        static_cast<int64_t>(static_cast<double>(values[rank]) * factor_of(static_cast<int>(rank)));
    product *= values[rank];
  }
  switch (op) {
    case ReduceOp::kSum:
      return sum;
    case ReduceOp::kAvg:
      return sum / std::ssize(values);
    case ReduceOp::kMin:
      return *std::ranges::min_element(values);
    case ReduceOp::kMax:
      return *std::ranges::max_element(values);
    case ReduceOp::kProduct:
      return product;
    case ReduceOp::kBand:
      return static_cast<int64_t>(all);
    case ReduceOp::kBor:
      return static_cast<int64_t>(any);
    case ReduceOp::kBxor:
      return static_cast<int64_t>(odd);
    case ReduceOp::kPremulSum:
      break;
  }
  return scaled_sum;
}

// Writes the number as a floating-point value, or the low bits of the integer for an integer dtype.
void write_number(std::vector<std::byte>& bytes, uint64_t i, DType dtype, int64_t value) {
  if (is_floating(dtype)) {
    testing::write_number(bytes, i, dtype, static_cast<double>(value));
  } else {
    std::memcpy(bytes.data() + i * size_of(dtype), &value, size_of(dtype));
  }
}

}  // namespace

std::string Case::to_string() const {
  const CollectiveEntry& entry = collectives()[collective];
  std::string text = format("{} of {} x {}", entry.name, dtype, count);
  if (entry.has_op) text += format(", {}", op);
  if (entry.has_root) text += format(", root {}", root);
  return text;
}

std::vector<Case> cases_for(int world_size) {
  std::vector<Case> cases;
  const auto world = static_cast<uint64_t>(world_size);
  for (size_t i = 0; i < collectives().size(); ++i) {
    const CollectiveEntry& entry = collectives()[i];
    const uint64_t large = entry.takes_count_per_rank ? kLargeCount / world : kLargeCount;
    for (int dtype = 0; dtype < (entry.has_data ? kNumDTypes : 1); ++dtype) {
      for (int op = 0; op < (entry.has_op ? kNumReduceOps : 1); ++op) {
        for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{7}, large}) {
          if (!entry.has_data && count > 0) continue;
          // The root changes from case to case, so that every rank is the root of some cases.
          const int root = entry.has_root ? static_cast<int>(cases.size() % world) : 0;
          cases.push_back({i, static_cast<DType>(dtype), static_cast<ReduceOp>(op), count, root});
        }
      }
    }
  }
  return cases;
}

std::vector<std::byte> numbers(const Case& c, Rank rank, int world_size, uint64_t begin,
                               uint64_t count) {
  std::vector<std::byte> bytes(count * size_of(c.dtype));
  for (uint64_t i = 0; i < count; ++i) {
    write_number(bytes, i, c.dtype, number_of(c, rank, world_size, begin + i));
  }
  return bytes;
}

std::vector<std::byte> noise(const Case& c, Rank rank, uint64_t count) {
  const uint64_t seed = c.count * 1000 + static_cast<uint64_t>(rank.value);
  return testing::random_inputs(1, count, c.dtype, seed)[0];
}

double factor_of(Rank rank) {
  return (rank.value % 3 + 1) / 2.0;
}

std::vector<std::byte> reduced(const Case& c, int world_size, uint64_t begin, uint64_t count) {
  std::vector<std::byte> bytes(count * size_of(c.dtype));
  std::vector<int64_t> values(static_cast<size_t>(world_size));
  for (uint64_t i = 0; i < count; ++i) {
    for (int rank = 0; rank < world_size; ++rank) {
      int64_t& value = values[static_cast<size_t>(rank)];
      value = number_of(c, rank, world_size, begin + i);
    }
    const int64_t result =
        c.dtype == DType::kBool ? reduce_bools(c.op, values) : reduce_numbers(c.op, values);
    write_number(bytes, i, c.dtype, result);
  }
  return bytes;
}

}  // namespace cadre::conformance
