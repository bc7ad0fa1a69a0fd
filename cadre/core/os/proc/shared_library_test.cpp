#include "cadre/core/os/proc/shared_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

TEST(SharedLibrary, GivesTheFunctionsOfALibrary) {
  const auto library = SharedLibrary::load("libm.so.6", "libc6").value_or_throw();
  double (*root)(double) = nullptr;
  library.find("sqrt", root).value_or_throw();
  EXPECT_EQ(root(4.0), 2.0);
  const Status missing = library.find("no_such_function", root);
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().message(), "libm.so.6 has no function no_such_function");
}

TEST(SharedLibrary, ALibraryThatIsNotThereIsNamedWithItsPackage) {
  const auto library = SharedLibrary::load("libnone.so.7", "libnone7");
  ASSERT_FALSE(library.ok());
  EXPECT_EQ(library.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(library.error().message(),
              HasSubstr("cannot load libnone.so.7 (package libnone7 of Debian): libnone.so.7: "));
}

}  // namespace
}  // namespace cadre::os
