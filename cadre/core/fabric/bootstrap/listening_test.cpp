#include "cadre/core/fabric/bootstrap/listening.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cadre/core/os/system.h"

namespace cadre {
namespace {

class ListeningTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(ListeningTest, ListensOnEachHostOfTheMembershipAndOnAUnixSocket) {
  Membership membership;
  membership.listen_hosts = {"127.0.0.1", "127.0.0.1"};
  const Listening listening =
      start_listening(*system_, membership, {.listen_host = "", .version = "1.2"}).value_or_throw();
  ASSERT_EQ(listening.tcp.size(), 2U);
  ASSERT_NE(listening.unix, nullptr);
  EXPECT_EQ(listening.rank_address.tcp_address, listening.tcp[0]->address().to_string() + " " +
                                                    listening.tcp[1]->address().to_string());
  EXPECT_EQ(listening.rank_address.unix_address, listening.unix->address().to_string());
  EXPECT_EQ(listening.rank_address.version, "1.2");
  EXPECT_EQ(listening.rank_address.pid, system_->host().pid);
  EXPECT_EQ(listening.all().size(), 3U);
}

TEST_F(ListeningTest, AnAddressThatOtherHostsReachNeedsAToken) {
  Membership membership;
  membership.rank = 3;
  const auto refused =
      start_listening(*system_, membership, {.listen_host = "0.0.0.0", .version = ""});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused.error().message(),
            "rank 3 is to listen on 0.0.0.0, which other hosts reach, and that needs a job token; "
            "set CADRE_JOB_TOKEN to one secret on all ranks");
  membership.job_token = "secret";
  EXPECT_TRUE(
      start_listening(*system_, membership, {.listen_host = "0.0.0.0", .version = ""}).ok());
}

TEST_F(ListeningTest, TheProbeIsNeverZero) {
  for (int i = 0; i < 16; ++i) EXPECT_EQ(address_of_this_process(*system_).probe % 2, 1U);
}

}  // namespace
}  // namespace cadre
