#include "cadre/base/fnv1a.h"

#include <gtest/gtest.h>

#include <string_view>

namespace cadre {
namespace {

uint64_t hash_of(std::string_view text) {
  Fnv1a hash;
  hash.add(text);
  return hash.value();
}

// The vectors of the authors' reference implementation.
TEST(Fnv1a, MatchesThePublishedVectors) {
  EXPECT_EQ(hash_of(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(hash_of("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(hash_of("foobar"), 0x85944171f73967e8ULL);
  EXPECT_EQ(hash_of(std::string_view("\xff", 1)), 0xaf64724c8602eb6eULL);
}

TEST(Fnv1a, ANumberIsOneItem) {
  Fnv1a byte;
  byte.add(uint64_t{'a'});
  EXPECT_EQ(byte.value(), hash_of("a"));
  Fnv1a wide;
  wide.add(uint64_t{0x6161});
  EXPECT_NE(wide.value(), hash_of("aa"));
}

TEST(Fnv1a, TheOrderOfItemsCounts) {
  EXPECT_NE(hash_of("ab"), hash_of("ba"));
}

}  // namespace
}  // namespace cadre
