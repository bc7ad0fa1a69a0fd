// Compares the kernels with a formula that works one element at a time.
#include "cadre/core/collective/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/reference_reduction.h"

namespace cadre {
namespace {

using testing::all_reduce_kinds;
using testing::Inputs;
using testing::random_inputs;
using testing::read_element;
using testing::reference_reduction;
using testing::write_element;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<const std::byte*> pointers(const Inputs& inputs, size_t offset_bytes = 0) {
  std::vector<const std::byte*> result;
  for (const auto& input : inputs) result.push_back(input.data() + offset_bytes);
  return result;
}

std::vector<InstructionSet> all_instruction_sets() {
  std::vector<InstructionSet> sets;
  for (int set = 0; set <= static_cast<int>(best_instruction_set()); ++set) {
    sets.push_back(static_cast<InstructionSet>(set));
  }
  return sets;
}

std::string describe(ReduceKind kind, size_t num_inputs, size_t count, InstructionSet set) {
  return format("{} of {} x {}, {} inputs, instruction set {}", kind.op, kind.dtype, count,
                num_inputs, static_cast<int>(set));
}

TEST(ReduceTest, EqualsTheFormulaBitForBit) {
  for (ReduceKind kind : all_reduce_kinds()) {
    for (size_t num_inputs = 1; num_inputs <= 9; ++num_inputs) {
      for (size_t count : {0, 1, 3, 15, 16, 17, 63, 64, 257, 1031}) {
        const Inputs inputs =
            random_inputs(num_inputs, count, kind.dtype, num_inputs * 131 + count);
        const std::vector<std::byte> expected = reference_reduction(inputs, kind);
        for (InstructionSet set : all_instruction_sets()) {
          for (StorePolicy stores : {StorePolicy::kCached, StorePolicy::kStreaming}) {
            std::vector<std::byte> out(expected.size());
            reduce(out.data(), pointers(inputs), count, kind,
                   {.stores = stores, .instruction_set = set});
            ASSERT_EQ(out, expected) << describe(kind, num_inputs, count, set);
          }
        }
      }
    }
  }
}

TEST(ReduceTest, BitsDoNotDependOnHowABufferIsCut) {
  constexpr size_t kCount = 777;
  for (ReduceKind kind : all_reduce_kinds()) {
    const Inputs inputs = random_inputs(5, kCount, kind.dtype, 7);
    const size_t element = size_of(kind.dtype);
    std::vector<std::byte> whole(kCount * element);
    reduce(whole.data(), pointers(inputs), kCount, kind);
    for (size_t cut : {1, 7, 16, 100, 776}) {
      std::vector<std::byte> pieces(kCount * element);
      for (size_t at = 0; at < kCount; at += cut) {
        reduce(pieces.data() + at * element, pointers(inputs, at * element),
               std::min(cut, kCount - at), kind);
      }
      ASSERT_EQ(pieces, whole) << describe(kind, 5, cut, best_instruction_set());
    }
  }
}

TEST(ReduceTest, TheOutputMayBeAnyInput) {
  constexpr size_t kCount = 301;
  for (ReduceKind kind : all_reduce_kinds()) {
    for (size_t target = 0; target < 3; ++target) {
      for (StorePolicy stores : {StorePolicy::kCached, StorePolicy::kStreaming}) {
        Inputs inputs = random_inputs(3, kCount, kind.dtype, 11);
        const std::vector<std::byte> expected = reference_reduction(inputs, kind);
        reduce(inputs[target].data(), pointers(inputs), kCount, kind, {.stores = stores});
        ASSERT_EQ(inputs[target], expected) << describe(kind, 3, kCount, best_instruction_set());
      }
    }
  }
}

TEST(ReduceTest, BuffersNeedNoAlignment) {
  constexpr size_t kCount = 203;
  for (ReduceKind kind : all_reduce_kinds()) {
    const size_t num_bytes = kCount * size_of(kind.dtype);
    const Inputs inputs = random_inputs(3, kCount, kind.dtype, 13);
    const std::vector<std::byte> expected = reference_reduction(inputs, kind);
    for (size_t offset : {1, 3, 31, 63}) {
      Inputs moved(3, std::vector<std::byte>(num_bytes + offset));
      for (size_t r = 0; r < 3; ++r) {
        std::memcpy(moved[r].data() + offset, inputs[r].data(), num_bytes);
      }
      std::vector<std::byte> out(num_bytes + offset + 1);
      reduce(out.data() + offset, pointers(moved, offset), kCount, kind);
      ASSERT_EQ(std::memcmp(out.data() + offset, expected.data(), num_bytes), 0)
          << describe(kind, 3, kCount, best_instruction_set()) << " at " << offset;
      ASSERT_EQ(out.back(), std::byte{0}) << "the byte behind the output was written";
    }
  }
}

// Tests all pairs of the given 16-bit numbers with every operation and every instruction set.
void expect_formula_for_pairs(const std::vector<uint16_t>& specials, DType dtype) {
  Inputs inputs(2, std::vector<std::byte>(specials.size() * specials.size() * 2));
  for (size_t i = 0; i < specials.size(); ++i) {
    for (size_t j = 0; j < specials.size(); ++j) {
      write_element(inputs[0], i * specials.size() + j, specials[i]);
      write_element(inputs[1], i * specials.size() + j, specials[j]);
    }
  }
  const size_t count = specials.size() * specials.size();
  for (ReduceKind kind : all_reduce_kinds()) {
    if (kind.dtype != dtype) continue;
    const std::vector<std::byte> expected = reference_reduction(inputs, kind);
    for (InstructionSet set : all_instruction_sets()) {
      std::vector<std::byte> out(count * 2);
      reduce(out.data(), pointers(inputs), count, kind, {.instruction_set = set});
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(read_element<uint16_t>(out, i), read_element<uint16_t>(expected, i))
            << format("{} of {} and {}", kind.op, read_element<uint16_t>(inputs[0], i),
                      read_element<uint16_t>(inputs[1], i));
      }
    }
  }
}

// The numbers include ties in both directions, the largest finite values, infinities, denormals,
// zeros and NaNs.
TEST(ReduceTest, SpecialValuesOfBfloat16EqualTheFormula) {
  expect_formula_for_pairs({0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0x3b80, 0x3c00,
                            0x3f81, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff, 0x4049},
                           DType::kBfloat16);
}

TEST(ReduceTest, SpecialValuesOfFloat16EqualTheFormula) {
  expect_formula_for_pairs({0x0000, 0x8000, 0x0001, 0x8001, 0x0003, 0x03ff, 0x83ff, 0x0400, 0x0401,
                            0x1000, 0x1001, 0x1400, 0x3800, 0x3c00, 0xbc00, 0x3c01, 0x4c00, 0x4c01,
                            0x7800, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xffff, 0x4248},
                           DType::kFloat16);
}

// Tests every float16 in combination with five other numbers.
TEST(ReduceTest, EveryFloat16EqualsTheFormula) {
  std::vector<std::byte> all(0x10000 * 2);
  for (size_t i = 0; i < 0x10000; ++i) write_element(all, i, static_cast<uint16_t>(i));
  for (uint32_t other : {0x0000U, 0x8001U, 0x3c00U, 0x2e66U, 0xfbffU}) {
    std::vector<std::byte> others(all.size());
    for (size_t i = 0; i < 0x10000; ++i) {
      write_element(others, i, static_cast<uint16_t>(other + i * 0x4f1d));
    }
    const Inputs inputs = {all, others};
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMax}) {
      const ReduceKind kind{DType::kFloat16, op};
      const std::vector<std::byte> expected = reference_reduction(inputs, kind);
      for (InstructionSet set : all_instruction_sets()) {
        std::vector<std::byte> out(all.size());
        reduce(out.data(), pointers(inputs), 0x10000, kind, {.instruction_set = set});
        ASSERT_EQ(out, expected) << describe(kind, 2, 0x10000, set);
      }
    }
  }
}

TEST(ReduceTest, AnyByteButZeroIsTrueAndTrueIsOne) {
  Inputs inputs(2, std::vector<std::byte>(4));
  for (size_t i = 0; i < 4; ++i) {
    inputs[0][i] = std::byte{static_cast<uint8_t>(i % 2 == 0 ? 0 : 2)};
    inputs[1][i] = std::byte{static_cast<uint8_t>(i < 2 ? 0 : 5)};
  }
  for (ReduceKind kind : all_reduce_kinds()) {
    if (kind.dtype != DType::kBool) continue;
    std::vector<std::byte> out(4);
    reduce(out.data(), pointers(inputs), 4, kind);
    EXPECT_EQ(out, reference_reduction(inputs, kind)) << format("{}", kind.op);
  }
}

TEST(ReduceTest, Bfloat16IsRoundedOnceAndNotAtEachAddition) {
  // Adding 2^-8 to 1 in bfloat16 is a tie that is rounded back to 1 in each step. The float32 sum
  // keeps both terms.
  Inputs inputs(3, std::vector<std::byte>(2));
  write_element<uint16_t>(inputs[0], 0, 0x3f80);  // 1
  write_element<uint16_t>(inputs[1], 0, 0x3b80);  // 2^-8
  write_element<uint16_t>(inputs[2], 0, 0x3b80);
  std::vector<std::byte> out(2);
  reduce(out.data(), pointers(inputs), 1, {DType::kBfloat16, ReduceOp::kSum});
  EXPECT_EQ(read_element<uint16_t>(out, 0), 0x3f81);  // 1 + 2^-7
}

TEST(ReduceTest, ANanInAnyInputComesOut) {
  for (ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (size_t where = 0; where < 3; ++where) {
      Inputs inputs(3, std::vector<std::byte>(5 * sizeof(double)));
      for (auto& input : inputs) {
        for (size_t i = 0; i < 5; ++i) write_element(input, i, i == 1 ? -kInfinity : 1.0);
      }
      write_element(inputs[where], 3, std::numeric_limits<double>::quiet_NaN());
      std::vector<std::byte> out(5 * sizeof(double));
      reduce(out.data(), pointers(inputs), 5, {DType::kFloat64, op});
      EXPECT_TRUE(std::isnan(read_element<double>(out, 3))) << format("{} at {}", op, where);
      EXPECT_FALSE(std::isnan(read_element<double>(out, 2)));
      EXPECT_EQ(read_element<double>(out, 1), -kInfinity);
    }
  }
}

}  // namespace
}  // namespace cadre
