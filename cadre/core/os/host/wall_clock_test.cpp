#include "cadre/core/os/host/wall_clock.h"

#include <gtest/gtest.h>

#include <regex>

namespace cadre::os {
namespace {

TEST(WallClock, IsIso8601InUtc) {
  const std::regex pattern(R"(2\d{3}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d\.\d{3}Z)");
  EXPECT_TRUE(std::regex_match(wall_clock_text(), pattern)) << wall_clock_text();
}

TEST(WallClock, SecondsSince1970AreADate) {
  EXPECT_EQ(wall_clock_text(0), "1970-01-01T00:00:00Z");
  EXPECT_EQ(wall_clock_text(951'827'696), "2000-02-29T12:34:56Z");
}

}  // namespace
}  // namespace cadre::os
