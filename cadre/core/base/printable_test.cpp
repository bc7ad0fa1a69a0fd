#include "cadre/core/base/printable.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace cadre {
namespace {

bool json_holds(const std::string& text) {
  try {
    return !nlohmann::json(text).dump().empty();
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

// Compares is_utf8() with a JSON library on all texts of one to three bytes from `bytes`, which are
// the limits of the ranges in UTF-8's rules, and on sequences of four bytes.
TEST(IsUtf8, IsWhatJsonHolds) {
  const std::string bytes =
      "a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf4\xf5\xff";
  int num_valid = 0;
  for (const char a : bytes) {
    for (const char b : bytes) {
      for (const char c : bytes) {
        for (const std::string& text :
             {std::string{a}, std::string{a, b}, std::string{a, b, c}, std::string{a, b, c, '\x80'},
              std::string{'\xf4', a, b, c}}) {
          EXPECT_EQ(is_utf8(text), json_holds(text));
          num_valid += is_utf8(text) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(num_valid, 1000);
  EXPECT_TRUE(is_utf8(""));
}

TEST(Printable, ControlCharactersBecomeTheirCode) {
  EXPECT_EQ(printable("a\tb\n\x1b[2J\x7f"), "a\tb\\x0a\\x1b[2J\\x7f");
  EXPECT_EQ(printable("\xc2\x85 caf\xc3\xa9"), "\\xc2\\x85 caf\xc3\xa9");
}

}  // namespace
}  // namespace cadre
