#include "cadre/core/os/host/peer_user.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

TEST(PeerUser, TheOwnerOfTheOtherEndIsKnown) {
  const auto system = make_native_system();
  const Deadline soon = system->deadline_in(std::chrono::seconds(20));
  for (const char* host : {"127.0.0.1", "::1"}) {
    const auto listener = system->listen({Address::Kind::kTcp, host, 0}).value_or_throw();
    auto client = system->connect(listener->address(), soon).value_or_throw();
    PollItem item{.target = listener.get(), .want_read = true};
    ASSERT_TRUE(system->poll(std::span(&item, 1), soon));
    const auto server = listener->try_accept().value_or_throw();
    for (const Socket* end : {client.get(), server.get()}) {
      EXPECT_EQ(peer_user_of(end->poll_handle()).value_or_throw(), ::geteuid());
      EXPECT_TRUE(end->check_peer_user().ok());
    }
    // The kernel reports root as the user of a client that has closed its socket; peer_user_of()
    // must return an error instead.
    client.reset();
    EXPECT_FALSE(peer_user_of(server->poll_handle()).ok());
    EXPECT_FALSE(server->check_peer_user().ok());
  }
}

TEST(PeerUser, RootAndThisUserAreLetIn) {
  EXPECT_TRUE(require_own_user(0U).ok());
  EXPECT_TRUE(require_own_user(::geteuid()).ok());
  const uint32_t other = ::geteuid() + 1;
  const Status refused = require_own_user(other);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message().find(cadre::format("user {}", other)), std::string::npos);
}

}  // namespace
}  // namespace cadre::os
