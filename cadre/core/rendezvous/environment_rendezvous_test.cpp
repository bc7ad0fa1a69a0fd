#include "cadre/core/rendezvous/environment_rendezvous.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "cadre/core/os/system.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

class EnvironmentRendezvousTest : public ::testing::Test {
 protected:
  Membership join(const JobEnvironment& environment) {
    return EnvironmentRendezvous(*system_, environment)
        .join(system_->deadline_in(std::chrono::seconds(20)))
        .value_or_throw();
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(EnvironmentRendezvousTest, WithoutALauncherIsAWorldOfOneWithoutAStore) {
  const Membership membership = join({});
  EXPECT_EQ(membership.rank, 0);
  EXPECT_EQ(membership.world_size, 1);
  EXPECT_EQ(membership.round, 0U);
  EXPECT_EQ(membership.store, nullptr);
}

// The keys in the store contain the round. A job that was started again, after a failure or because
// hosts came or went, must not use keys from before, however often its ranks had rejoined.
TEST_F(EnvironmentRendezvousTest, EachAttemptBeginsAMillionRoundsLater) {
  const testing::TemporaryFolder folder;
  EXPECT_EQ(join({.restart_count = 2, .attempt = 2}).round, 2'000'000U);
  EXPECT_EQ(join({.store_file = folder.file("store"), .restart_count = 1, .attempt = 3}).round,
            3'000'000U);
}

}  // namespace
}  // namespace cadre
