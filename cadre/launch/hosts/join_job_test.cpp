#include "cadre/launch/hosts/join_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/os/system.h"

namespace cadre::launch {
namespace {

using ::testing::HasSubstr;

class JoinJobTest : public ::testing::Test {
 protected:
  // Returns the address of the agent. The endpoint of the job is a port of loopback.
  Result<std::string> address(HostsSpec spec) {
    spec.endpoint = endpoint_;
    const auto options = prepare_agent(*system_, spec, {.job = "job"});
    if (!options.ok()) return options.error();
    return options->agent.self.address;
  }
  std::unique_ptr<os::Listener> listen(uint16_t port) {
    return system_->listen({os::Address::Kind::kTcp, "127.0.0.1", port}).value_or_throw();
  }
  void take_endpoint() { taken_ = listen(endpoint_.port); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const os::Address endpoint_ = listen(0)->address();
  std::unique_ptr<os::Listener> taken_;
};

TEST_F(JoinJobTest, TheFirstAgentOfTheHostIsAtTheEndpointAndTheNextOneIsNot) {
  EXPECT_EQ(*address({}), endpoint_.host_and_port());
  take_endpoint();
  const auto next = address({});
  ASSERT_TRUE(next.ok()) << next.error().message();
  EXPECT_NE(*next, endpoint_.host_and_port());
  EXPECT_TRUE(next->starts_with("127.0.0.1:")) << *next;
}

TEST_F(JoinJobTest, AHostThatIsNotTheEndpointLeavesItFree) {
  EXPECT_NE(*address({.is_endpoint_host = false}), endpoint_.host_and_port());
  EXPECT_NE(*address({.node_rank = 1}), endpoint_.host_and_port());
}

TEST_F(JoinJobTest, AHostThatMustBeTheEndpointNeedsIt) {
  for (const HostsSpec& spec : {HostsSpec{.is_endpoint_host = true}, HostsSpec{.node_rank = 0}}) {
    taken_.reset();
    EXPECT_EQ(*address(spec), endpoint_.host_and_port());
    take_endpoint();
    const auto second = address(spec);
    ASSERT_FALSE(second.ok());
    EXPECT_THAT(second.error().message(),
                HasSubstr(spec.node_rank ? "node 0 must be at the endpoint of the job, 127.0.0.1:"
                                         : "a host with is_host=1 must be at the endpoint"));
  }
}

}  // namespace
}  // namespace cadre::launch
