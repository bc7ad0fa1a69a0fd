#include "cadre/core/base/types.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace cadre {
namespace {

// Expects that the first `count` values of the enumeration have names that all differ.
template <typename Enum>
void expect_names(int count) {
  std::set<std::string_view> names;
  for (int i = 0; i < count; ++i) names.insert(to_string(static_cast<Enum>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(count));
  EXPECT_FALSE(names.contains("unknown"));
  // A value may come from the network, so it may be out of range.
  EXPECT_EQ(to_string(static_cast<Enum>(count)), "unknown");
}

TEST(Types, EveryValueHasANameOfItsOwn) {
  expect_names<DType>(kNumDTypes);
  expect_names<ReduceOp>(kNumReduceOps);
  expect_names<OpKind>(kNumOpKinds);
}

// These numbers are part of the formats on the wire and on disk, so they must never change.
TEST(Types, TheNumbersAreThoseOfTheFormats) {
  EXPECT_EQ(static_cast<int>(DType::kUint8), 0);
  EXPECT_EQ(static_cast<int>(DType::kFloat16), 9);
  EXPECT_EQ(static_cast<int>(ReduceOp::kSum), 0);
  EXPECT_EQ(static_cast<int>(ReduceOp::kPremulSum), 8);
  EXPECT_EQ(static_cast<int>(OpKind::kBroadcast), 0);
  EXPECT_EQ(static_cast<int>(OpKind::kAllToAllV), 12);
}

TEST(Types, DTypesAreFoundByName) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
  }
  for (const char* text : {"", "float", "Float32", "float32 ", "unknown"}) {
    EXPECT_EQ(parse_dtype(text), std::nullopt) << text;
  }
}

TEST(Types, SizesAreThoseOfTheNames) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name(to_string(dtype));
    const size_t digits = name.find_first_of("0123456789");
    const size_t bits = digits == std::string::npos ? 8 : std::stoul(name.substr(digits));
    EXPECT_EQ(size_of(dtype), bits / 8) << name;
  }
  EXPECT_EQ(size_of(static_cast<DType>(kNumDTypes)), 0u);
}

TEST(Rank, IsANumberThatPrintsAndCompares) {
  const Rank rank = 3;
  EXPECT_EQ(rank, 3);
  EXPECT_EQ(rank + 1, 4);
  EXPECT_EQ(Rank().value, 0);
}

}  // namespace
}  // namespace cadre
