#include "cadre/core/os/proc/environment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace cadre::os {
namespace {

TEST(EnvironmentValue, KeepsTheLastValueOfAName) {
  Environment environment;
  environment.set("B", "1");
  environment.set("A", "x=y");
  environment.set("B", "2");
  EXPECT_EQ(environment.to_texts(), (std::vector<std::string>{"A=x=y", "B=2"}));
  EXPECT_EQ(environment.get("C"), std::nullopt);
  EXPECT_EQ(environment.get_or("C", "z"), "z");
}

TEST(EnvironmentValue, OfAVariableThatIsThereTwiceTheFirstCountsAsForGetenv) {
  std::array entries{std::string("TWICE=first"), std::string("TWICE=second"), std::string("odd"),
                     std::string("ONCE=")};
  std::array<char*, 5> variables{entries[0].data(), entries[1].data(), entries[2].data(),
                                 entries[3].data(), nullptr};
  char** const before = ::environ;
  ::environ = variables.data();
  const Environment environment = read_environment();
  ::environ = before;
  EXPECT_EQ(environment.to_texts(), (std::vector<std::string>{"ONCE=", "TWICE=first"}));
}

}  // namespace
}  // namespace cadre::os
