#include "cadre/core/wire/hex.h"

#include <gtest/gtest.h>

#include <array>

namespace cadre::wire {
namespace {

TEST(Hex, EachByteIsTwoDigitsWithTheHighOneFirst) {
  const std::array bytes{std::byte{0x00}, std::byte{0x0f}, std::byte{0xa9}, std::byte{0xff}};
  EXPECT_EQ(to_hex(bytes), "000fa9ff");
  EXPECT_EQ(to_hex({}), "");
}

}  // namespace
}  // namespace cadre::wire
