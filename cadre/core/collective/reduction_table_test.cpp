// Compares the table with a matrix written by hand, and the page of the guide with the table.
#include "cadre/core/collective/reduction_table.h"

#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/paths.h"

namespace cadre {
namespace {

struct Class {
  std::string_view title;
  std::vector<DType> dtypes;
};

const std::array<Class, 4> kClasses = {
    {{"Integers", {DType::kUint8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}},
     {"Truth values", {DType::kBool}},
     {"Half precision", {DType::kFloat16, DType::kBfloat16}},
     {"Single and double precision", {DType::kFloat32, DType::kFloat64}}}};

ReduceOp op_at(int index) {
  return static_cast<ReduceOp>(index);
}

TEST(ReductionTableTest, SupportsWhatTheMatrixSays) {
  // The rows are kClasses. The columns are: sum avg min max product band bor bxor premul_sum.
  const std::array<std::string_view, 4> matrix = {"x-xxxxxx-", "x-xxxxxx-", "xxxxx---x",
                                                  "xxxxx---x"};
  int num_dtypes = 0;
  for (size_t c = 0; c < kClasses.size(); ++c) {
    for (const DType dtype : kClasses[c].dtypes) {
      ++num_dtypes;
      for (int op = 0; op < kNumReduceOps; ++op) {
        const bool expected = matrix[c][static_cast<size_t>(op)] == 'x';
        EXPECT_EQ(is_supported(dtype, op_at(op)), expected) << format("{} of {}", op_at(op), dtype);
        EXPECT_EQ(check_reduction(dtype, op_at(op)).ok(), expected);
      }
    }
  }
  EXPECT_EQ(num_dtypes, kNumDTypes);
}

TEST(ReductionTableTest, ARefusalIsOneSentenceThatSaysWhatToDo) {
  const Status status = check_reduction(DType::kInt32, ReduceOp::kAvg);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.error().message(),
            "avg of int32 is refused: the mean of integers is no integer; use sum and divide, or a "
            "floating-point dtype");
}

TEST(ReductionTableTest, ValuesThatDoNotExistAreRefused) {
  EXPECT_FALSE(check_reduction(static_cast<DType>(kNumDTypes), ReduceOp::kSum).ok());
  EXPECT_FALSE(check_reduction(DType::kFloat32, static_cast<ReduceOp>(kNumReduceOps)).ok());
}

// Returns the text that belongs between the markers of the page, made from the table.
std::string rendered_table() {
  std::string text;
  for (const Class& group : kClasses) {
    text += format("\n## {}:", group.title);
    for (size_t i = 0; i < group.dtypes.size(); ++i) {
      text += format("{} {}", i == 0 ? "" : ",", group.dtypes[i]);
    }
    text += "\n| operation | |\n|---|---|\n";
    for (int op = 0; op < kNumReduceOps; ++op) {
      const ReductionRule rule = reduction_rule(group.dtypes[0], op_at(op));
      for (const DType dtype : group.dtypes) {
        EXPECT_EQ(reduction_rule(dtype, op_at(op)).meaning, rule.meaning);
      }
      text += format("| {} | {}{} |\n", op_at(op),
                     rule.is_supported ? "" : "**refused**: ", rule.meaning);
    }
  }
  return text + "\n";
}

TEST(ReductionTableTest, TheGuideSaysWhatTheTableSays) {
  std::ifstream file(testing::source_path("docs/guide/reference/reductions.md"));
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_NE(page.str().find("<!-- table -->\n" + rendered_table() + "<!-- end of table -->"),
            std::string::npos)
      << "docs/guide/reference/reductions.md must hold, between its markers:\n"
      << rendered_table();
}

}  // namespace
}  // namespace cadre
