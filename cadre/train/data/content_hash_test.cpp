#include "cadre/train/data/content_hash.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre {
namespace {

// These are hashes of XXH64 with seed 0 from the specification and from other implementations.
TEST(ContentHash, IsXxh64) {
  EXPECT_EQ(content_hash(""), 0xEF46DB3751D8E999u);
  EXPECT_EQ(content_hash("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(content_hash("abc"), 0x44BC2CF5AD770999u);
  // The documentation of the Python package xxhash contains this example.
  EXPECT_EQ(content_hash("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1u);
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

TEST(ContentHash, PartsHaveTheHashOfTheWhole) {
  std::string text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i * 7));
  for (size_t first = 0; first <= 100; ++first) {
    for (const size_t second :
         {size_t{0}, size_t{1}, size_t{31}, size_t{32}, size_t{33}, size_t{70}}) {
      ContentHash hash;
      hash.add(std::string_view(text).substr(0, first));
      hash.add(std::string_view(text).substr(first, second));
      hash.add(std::string_view(text).substr(first + second));
      ASSERT_EQ(hash.value(), content_hash(text)) << first << " " << second;
    }
  }
}

}  // namespace
}  // namespace cadre
