#include "cadre/core/wire/error_file.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

TEST(ErrorFileFormat, IsThatOfTorchelastic) {
  const ErrorFile file{.message = "cadre::Error: x",
                       .call_stack = "cadre::Error: x\n",
                       .timestamp_s = 1234,
                       .details = {{"code", "kPeerLost"}, {"culprit", int64_t{1}}}};
  const std::string text = encode_error_file(file);
  EXPECT_EQ(
      text,
      R"({"message":{"extraInfo":{"cadre":{"code":"kPeerLost","culprit":1},)"
      R"("py_callstack":"cadre::Error: x\n","timestamp":"1234"},"message":"cadre::Error: x"}})");
  EXPECT_EQ(parse_error_file(text), file);
}

TEST(ErrorFileFormat, BytesThatAreNotUtf8AreReplaced) {
  EXPECT_EQ(parse_error_file(encode_error_file({.message = "a\xff"}))->message, "a\xef\xbf\xbd");
}

TEST(ErrorFileFormat, OtherFieldsAndTypesAreIgnored) {
  const auto file = parse_error_file(
      R"({"message": {"message": "x", "extraInfo": {"timestamp": 5, "cadre": {"a": [1]}}}})");
  ASSERT_TRUE(file);
  EXPECT_EQ(*file, (ErrorFile{.message = "x"}));
}

}  // namespace
}  // namespace cadre
