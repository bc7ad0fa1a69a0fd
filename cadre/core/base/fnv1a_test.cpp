#include "cadre/core/base/fnv1a.h"

#include <gtest/gtest.h>

#include <string_view>

namespace cadre {
namespace {

// The reference implementation of the authors publishes these vectors.
TEST(Fnv1a, MatchesThePublishedVectors) {
  EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8ULL);
  EXPECT_EQ(fnv1a(std::string_view("\xff", 1)), 0xaf64724c8602eb6eULL);
}

TEST(Fnv1a, ANumberIsOneItem) {
  Fnv1a byte;
  byte.add(uint64_t{'a'});
  EXPECT_EQ(byte.value(), fnv1a("a"));
  Fnv1a wide;
  wide.add(uint64_t{0x6161});
  EXPECT_NE(wide.value(), fnv1a("aa"));
}

TEST(Fnv1a, TheOrderOfItemsCounts) {
  EXPECT_NE(fnv1a("ab"), fnv1a("ba"));
}

}  // namespace
}  // namespace cadre
