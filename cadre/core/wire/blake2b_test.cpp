#include "cadre/core/wire/blake2b.h"

#include <gtest/gtest.h>

#include <array>

#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

// The first vector comes from RFC 7693, appendix A. The second is the known digest of the empty
// text.
TEST(Blake2b, MatchesThePublishedVectors) {
  EXPECT_EQ(blake2b_hex(as_bytes("abc")).value(),
            "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
            "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  EXPECT_EQ(blake2b_hex(ConstBytes()).value(),
            "786a02f742015903c6c6fd852552d272912f4740e15847618a86e217f71f5419"
            "d25e1031afee585313896444934eb04b903a685b1448b755d56f701afe9be2ce");
}

TEST(Blake2b, OfPiecesIsThatOfTheWhole) {
  const std::array<ConstBytes, 4> pieces = {as_bytes("a"), ConstBytes(), as_bytes("b"),
                                            as_bytes("c")};
  EXPECT_EQ(blake2b_hex(pieces).value(), blake2b_hex(as_bytes("abc")).value());
}

}  // namespace
}  // namespace cadre::wire
