#include <gtest/gtest.h>

#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/system_conformance.h"

namespace cadre::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Native, SystemConformance,
                         ::testing::Values(SystemWorld{
                             "native",
                             [](const std::function<void(os::System&)>& body) {
                               const Resources before = count_resources();
                               const auto system = os::make_native_system();
                               body(*system);
                               EXPECT_EQ(leftovers_since(before), "");
                             }}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace cadre::testing
