// Compares the addresses at which ranks are reached with values that were worked out by hand.
#include "cadre/core/rendezvous/exchange_addresses.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre {
namespace {

using Hosts = std::vector<std::string>;

TEST(ListenHosts, AreWhereARankReachesTheStoreFrom) {
  const std::vector<StoreView> views = {{"10.0.0.1", "10.0.0.1"}, {"10.0.0.2", "10.0.0.1"}};
  EXPECT_EQ(choose_listen_hosts(views, 0).value(), Hosts{"10.0.0.1"});
  EXPECT_EQ(choose_listen_hosts(views, 1).value(), Hosts{"10.0.0.2"});
}

TEST(ListenHosts, OfTheStoresHostAreWhereTheOthersReachTheStore) {
  // Ranks 0 and 1 are on the store's host. Ranks 2 to 4 reach it through two of its interfaces.
  const std::vector<StoreView> views = {{"127.0.0.1", "127.0.1.1"},
                                        {"::1", "::1"},
                                        {"10.0.0.2", "10.0.0.1"},
                                        {"fd00::2", "fd00::1"},
                                        {"10.0.0.3", "10.0.0.1"}};
  EXPECT_EQ(choose_listen_hosts(views, 0).value(), (Hosts{"10.0.0.1", "fd00::1"}));
  EXPECT_EQ(choose_listen_hosts(views, 1).value(), (Hosts{"10.0.0.1", "fd00::1"}));
  EXPECT_EQ(choose_listen_hosts(views, 3).value(), Hosts{"fd00::2"});
}

TEST(ListenHosts, AreLoopbackWhileAllAreOnOneHost) {
  EXPECT_EQ(
      choose_listen_hosts({{"127.0.0.1", "127.0.0.1"}, {"127.0.0.1", "127.0.0.1"}}, 1).value(),
      Hosts{"127.0.0.1"});
  EXPECT_EQ(choose_listen_hosts({{"::1", "::1"}, {"::1", "::1"}}, 1).value(), Hosts{"::1"});
  // The ranks see the store over a unix socket.
  EXPECT_EQ(choose_listen_hosts({{}, {}}, 0).value(), Hosts{"127.0.0.1"});
}

TEST(ListenHosts, AreNeverLinkLocal) {
  const auto refused = choose_listen_hosts({{"fe80::1", "fe80::2"}, {"fe80::2", "fe80::2"}}, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace cadre
