#include "cadre/tensor/group/operands/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace cadre {
namespace {

TEST(Dtype, EveryTypeOfAGroupHasOneTypeOfLibtorch) {
  std::set<at::ScalarType> types;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const at::ScalarType type = to_scalar_type(dtype);
    EXPECT_EQ(to_dtype(type), dtype);
    EXPECT_EQ(c10::elementSize(type), size_of(dtype)) << dtype_name(type);
    EXPECT_EQ(dtype_name(type), to_string(dtype));
    types.insert(type);
  }
  EXPECT_EQ(types.size(), static_cast<size_t>(kNumDTypes));
}

TEST(Dtype, OtherTypesHaveNone) {
  EXPECT_EQ(to_dtype(at::kComplexFloat), std::nullopt);
  EXPECT_EQ(to_dtype(at::ScalarType::Undefined), std::nullopt);
  EXPECT_EQ(dtype_name(at::kComplexFloat), "complex64");
  EXPECT_EQ(dtype_name(at::ScalarType::Undefined), "undefined");
  const std::string names = dtype_names();
  EXPECT_EQ(names.find("complex"), std::string::npos) << names;
  EXPECT_NE(names.find(" and "), std::string::npos) << names;
}

}  // namespace
}  // namespace cadre
