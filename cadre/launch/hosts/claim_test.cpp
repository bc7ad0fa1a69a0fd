#include "cadre/launch/hosts/claim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre::launch {
namespace {

using ::testing::HasSubstr;

constexpr const char* kText =
    R"({"format":"cadre-coordinator","version":1,"job":"bert","agent":"00000000000000ff",)"
    R"("epoch":2,"round":3,"address":"[fd00::1]:29400"})";

TEST(Claim, HasTheDocumentedText) {
  const Claim claim{.agent = 255, .epoch = 2, .round = 3, .address = "[fd00::1]:29400"};
  EXPECT_EQ(encode_claim("bert", claim), kText);
  EXPECT_EQ(*decode_claim("bert", kText, "the key k"), claim);
  const std::string job = "a \"job\" \xc3\xa9";
  EXPECT_EQ(*decode_claim(job, encode_claim(job, claim), "the key k"), claim);
}

TEST(Claim, EachMemberIsChecked) {
  const auto changed = [](const std::string& from, const std::string& to) {
    std::string text = kText;
    return text.replace(text.find(from), from.size(), to);
  };
  const std::vector<std::string> wrong = {
      "",
      "[]",
      changed("}", ""),
      changed("cadre-coordinator", "cadre"),
      changed("\"version\":1,", ""),
      changed("00000000000000ff", "0000000000000000"),
      changed("00000000000000ff", "ff"),
      changed("00000000000000ff", "00000000000000fg"),
      changed("\"epoch\":2", "\"epoch\":-2"),
      changed("\"round\":3", "\"round\":3.5"),
      changed("[fd00::1]:29400", "[fd00::1]:0"),
      changed("[fd00::1]:29400", ":29400"),
      changed("[fd00::1]:29400", std::string(Table::kMaxTextBytes, 'a') + ":1"),
      changed("\"bert\"", "7"),
      kText + std::string(Claim::kMaxTextBytes, ' '),
  };
  for (const std::string& text : wrong) {
    const auto claim = decode_claim("bert", text, "the key k");
    ASSERT_FALSE(claim.ok()) << text;
    EXPECT_EQ(claim.error().code(), ErrorCode::kCorruption);
    EXPECT_THAT(claim.error().message(), HasSubstr("the key k holds something else"));
  }
  EXPECT_THAT(
      decode_claim("bert", changed("\"version\":1", "\"version\":2"), "k").error().message(),
      HasSubstr("has version 2 of the format, but this cadre reads version 1"));
  EXPECT_THAT(decode_claim("gpt", kText, "k").error().message(),
              HasSubstr("belongs to job \"bert\", not to \"gpt\""));
}

}  // namespace
}  // namespace cadre::launch
