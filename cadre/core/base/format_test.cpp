#include "cadre/core/base/format.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {
namespace {

TEST(Format, WritesEveryKindOfValue) {
  EXPECT_EQ(format("{} {} {}", int8_t{-1}, uint16_t{2}, std::numeric_limits<uint64_t>::max()),
            "-1 2 18446744073709551615");
  EXPECT_EQ(format("{} {:.2f} {:g}", true, 1.0 / 3, 0.5F), "true 0.33 0.5");
  EXPECT_EQ(format("{}{}{}", 'c', "text", std::string("more")), "ctextmore");
  EXPECT_EQ(format("{:04x} {:>5} {{}}", 255, "ab"), "00ff    ab {}");
}

TEST(Format, KnowsTheVocabulary) {
  EXPECT_EQ(format("rank {} {} {} {}", Rank(3), DType::kBfloat16, ReduceOp::kPremulSum,
                   OpKind::kAllToAllV),
            "rank 3 bfloat16 premul_sum all_to_all_v");
}

TEST(Format, AListOfSizesIsWrittenInParentheses) {
  EXPECT_EQ(list_of({}), "()");
  EXPECT_EQ(list_of(std::vector<int64_t>{-4}), "(-4)");
  EXPECT_EQ(list_of(std::vector<int64_t>{4, 3, 0}), "(4, 3, 0)");
}

TEST(Format, APatternThatIsWrongIsADefectOfTheLibrary) {
  for (const char* pattern : {"{} {}", "{", "{:y}"}) {
    try {
      (void)format(pattern, 1);
      ADD_FAILURE() << pattern;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
      EXPECT_NE(error.message().find(pattern), std::string::npos) << error.message();
    }
  }
}

}  // namespace
}  // namespace cadre
