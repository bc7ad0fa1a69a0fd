// Compares each conversion with one that works a single element at a time.
#include "cadre/core/collective/net/elementwise.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cadre/testing/core/reference_reduction.h"

namespace cadre {
namespace {

TEST(Elementwise, EveryHalfIsWidenedExactlyAndNarrowedBack) {
  constexpr size_t kCount = size_t{1} << 16;
  std::vector<std::byte> halves(2 * kCount);
  for (size_t i = 0; i < kCount; ++i) {
    testing::write_element(halves, i, static_cast<uint16_t>(i));
  }
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    std::vector<float> wide(kCount);
    widen(wide.data(), halves.data(), kCount, dtype);
    std::vector<std::byte> narrowed(2 * kCount);
    narrow(narrowed.data(), wide.data(), kCount, dtype);
    for (size_t i = 0; i < kCount; ++i) {
      const auto code = static_cast<uint16_t>(i);
      const float expected = testing::from_half(code, dtype);
      const auto back = testing::read_element<uint16_t>(narrowed, i);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
        ASSERT_EQ(back, dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected)) << i;
        ASSERT_EQ(back, code) << i;
      }
    }
  }
}

TEST(Elementwise, NarrowingRoundsToNearestEven) {
  // Every second number is a tie, half-way between two 16-bit numbers. The 19 elements are one
  // whole vector and a remainder.
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const float half_step = dtype == DType::kFloat16 ? 0x1p-11F : 0x1p-8F;
    std::vector<float> wide;
    for (int i = 0; i < 19; ++i) wide.push_back(1.0F + static_cast<float>(i) * half_step);
    std::vector<std::byte> narrowed(2 * wide.size() + 2);
    narrow(narrowed.data(), wide.data(), wide.size(), dtype);
    for (size_t i = 0; i < wide.size(); ++i) {
      EXPECT_EQ(testing::read_element<uint16_t>(narrowed, i), testing::to_half(wide[i], dtype))
          << i;
    }
    EXPECT_EQ(testing::read_element<uint16_t>(narrowed, wide.size()), 0);
  }
}

TEST(Elementwise, DividesFloatsOfBothSizes) {
  std::vector<float> floats;
  std::vector<double> doubles;
  for (int i = 0; i < 19; ++i) {
    floats.push_back(static_cast<float>(i) + 0.1F);
    doubles.push_back(i + 0.1);
  }
  divide(reinterpret_cast<std::byte*>(floats.data()), 18, DType::kFloat32, 3);
  divide(reinterpret_cast<std::byte*>(doubles.data()), 18, DType::kFloat64, 3);
  for (int i = 0; i < 18; ++i) {
    EXPECT_EQ(floats[static_cast<size_t>(i)], (static_cast<float>(i) + 0.1F) / 3) << i;
    EXPECT_EQ(doubles[static_cast<size_t>(i)], (i + 0.1) / 3) << i;
  }
  EXPECT_EQ(floats[18], 18 + 0.1F);
  EXPECT_EQ(doubles[18], 18 + 0.1);
}

}  // namespace
}  // namespace cadre
