#include "cadre/core/wire/challenge.h"

#include <gtest/gtest.h>

#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) text += format("{:02x}", std::to_integer<int>(byte));
  return text;
}

TEST(Challenge, HmacMatchesThePublishedVectors) {
  // The first two are test cases 1 and 2 of RFC 4231. The last one is the published digest of an
  // empty message with an empty key.
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), as_bytes("Hi There")).value()),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", as_bytes("what do ya want for nothing?")).value()),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256("", {}).value()),
            "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(Challenge, AProofDependsOnEverythingItShould) {
  Nonce one = {};
  Nonce two = {};
  two.back() = std::byte{1};
  const Digest proof = prove_token("token", "client", one, two).value();
  EXPECT_EQ(proof, prove_token("token", "client", one, two).value());
  EXPECT_NE(proof, prove_token("token2", "client", one, two).value());
  EXPECT_NE(proof, prove_token("token", "server", one, two).value());
  EXPECT_NE(proof, prove_token("token", "client", two, one).value());
  EXPECT_NE(proof, prove_token("token", "client", two, two).value());
  EXPECT_NE(proof, prove_token("token", "client", one, one).value());
}

TEST(Challenge, ComparesContentsAndSizes) {
  EXPECT_TRUE(equals_in_constant_time(as_bytes("abc"), as_bytes("abc")));
  EXPECT_FALSE(equals_in_constant_time(as_bytes("abc"), as_bytes("abd")));
  EXPECT_FALSE(equals_in_constant_time(as_bytes("abc"), as_bytes("ab")));
  EXPECT_TRUE(equals_in_constant_time({}, {}));
}

}  // namespace
}  // namespace cadre::wire
