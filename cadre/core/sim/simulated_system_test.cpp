#include <gtest/gtest.h>

#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/system_conformance.h"

namespace cadre::testing {
namespace {

SystemWorld simulated_world(uint64_t seed) {
  return {cadre::format("seed{}", seed), [seed](const std::function<void(os::System&)>& body) {
            sim::Simulator simulator(seed, {.ranks_per_host = {1}});
            const sim::SimResult result =
                simulator.run([&](os::System& system, int) { body(system); });
            EXPECT_EQ(result.failure, "");
            EXPECT_EQ(result.ranks[0].failure, "");
          }};
}

INSTANTIATE_TEST_SUITE_P(Simulated, SystemConformance,
                         ::testing::Values(simulated_world(1), simulated_world(2),
                                           simulated_world(3)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace cadre::testing
