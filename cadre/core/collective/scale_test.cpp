#include "cadre/core/collective/scale.h"

#include <gtest/gtest.h>

#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/reference_reduction.h"

namespace cadre {
namespace {

TEST(ScaleTest, EqualsTheFormulaBitForBitAlsoInPlace) {
  for (DType dtype : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
    for (size_t count : {0, 1, 15, 16, 17, 1031}) {
      const auto input = testing::random_inputs(1, count, dtype, count)[0];
      for (double factor : {0.5, 1.0 / 3, -3e5, 0.0}) {
        const auto expected = testing::reference_scaling(input, dtype, factor);
        for (int number = 0; number <= static_cast<int>(best_instruction_set()); ++number) {
          const auto set = static_cast<InstructionSet>(number);
          std::vector<std::byte> out(input.size());
          scale(out.data(), input.data(), count, dtype, factor, set);
          ASSERT_EQ(out, expected) << format("{} x {} times {}", dtype, count, factor);
          std::vector<std::byte> in_place = input;
          scale(in_place.data(), in_place.data(), count, dtype, factor, set);
          ASSERT_EQ(in_place, expected) << format("{} x {} times {}", dtype, count, factor);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cadre
