// Tests the addresses at which a listener listens for a name. tests/process has the tests with
// several hosts, which are network namespaces.
#include "cadre/core/os/io/interfaces.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cadre/core/os/native/connect.h"

namespace cadre::os {
namespace {

std::vector<std::string> hosts_of(const std::string& host) {
  std::vector<std::string> hosts;
  const auto addresses = listening_addresses({Address::Kind::kTcp, host, 80}).value_or_throw();
  for (const SocketAddress& address : addresses) {
    hosts.push_back(to_address(address).host);
    EXPECT_EQ(to_address(address).port, 80);
  }
  return hosts;
}

TEST(Interfaces, NumericAddressesMeanThemselves) {
  EXPECT_EQ(hosts_of("127.0.0.1"), std::vector<std::string>{"127.0.0.1"});
  EXPECT_EQ(hosts_of("127.0.1.1"), std::vector<std::string>{"127.0.1.1"});
  EXPECT_EQ(hosts_of("::1"), std::vector<std::string>{"::1"});
}

TEST(Interfaces, LocalhostIsLoopbackAndNothingElse) {
  for (const std::string& host : hosts_of("localhost")) {
    EXPECT_TRUE(host == "::1" || host.starts_with("127.")) << host;
  }
}

TEST(Interfaces, SeveralListenersShareOnePort) {
  const auto fds = open_listeners({Address::Kind::kTcp, "localhost", 0}).value_or_throw();
  ASSERT_FALSE(fds.empty());
  for (const Fd& fd : fds) {
    EXPECT_EQ(local_address_of(fd.get()).port, local_address_of(fds[0].get()).port);
  }
}

TEST(Interfaces, ARouteIsToldWithAddressAndInterface) {
  const auto target = resolve({Address::Kind::kTcp, "127.0.0.1", 1}).value_or_throw();
  EXPECT_EQ(describe_route_to(target[0]), "from 127.0.0.1 on lo");
}

TEST(Interfaces, ListsLoopbackAndFindsTheSourceOfARoute) {
  const InterfaceAddress loopback{.interface = "lo", .host = "127.0.0.1", .is_loopback = true};
  const auto all = interface_addresses();
  EXPECT_NE(std::ranges::find(all, loopback), all.end());
  const auto target = resolve({Address::Kind::kTcp, "127.0.0.1", 1}).value_or_throw();
  EXPECT_EQ(source_towards(target[0]), loopback);
}

}  // namespace
}  // namespace cadre::os
