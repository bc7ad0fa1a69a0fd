#include "cadre/data/content_hash.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre {
namespace {

// Hashes of XXH64 with seed 0 from the specification and other implementations.
TEST(ContentHash, IsXxh64) {
  EXPECT_EQ(content_hash(""), 0xEF46DB3751D8E999u);
  EXPECT_EQ(content_hash("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(content_hash("abc"), 0x44BC2CF5AD770999u);
}

TEST(ContentHash, EveryByteOfEveryLengthCounts) {
  std::string text;
  for (int size = 1; size < 100; ++size) {
    text.push_back(static_cast<char>(size * 7));
    const uint64_t whole = content_hash(text);
    for (char& byte : text) {
      byte ^= 1;
      EXPECT_NE(content_hash(text), whole) << size;
      byte ^= 1;
    }
    EXPECT_NE(content_hash(text.substr(1)), whole);
  }
}

}  // namespace
}  // namespace cadre
