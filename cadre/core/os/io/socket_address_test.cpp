#include "cadre/core/os/io/socket_address.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <vector>

#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

TEST(SocketAddress, NumericAndUnixAddressesComeBack) {
  for (const Address& address :
       {Address{Address::Kind::kTcp, "127.0.0.1", 29500}, Address{Address::Kind::kTcp, "::1", 80},
        Address{Address::Kind::kUnix, "job-17", 0}}) {
    const std::vector<SocketAddress> found = resolve(address).value_or_throw();
    ASSERT_EQ(found.size(), 1U) << address.to_string();
    EXPECT_EQ(to_address(found[0]), address);
  }
}

TEST(SocketAddress, AUnixNameIsAbstractAndBounded) {
  const std::string longest(107, 'x');
  const SocketAddress found = resolve({Address::Kind::kUnix, longest, 0}).value_or_throw().front();
  EXPECT_EQ(found.family(), AF_UNIX);
  EXPECT_EQ(found.size, offsetof(sockaddr_un, sun_path) + 1 + longest.size());
  EXPECT_EQ(reinterpret_cast<const sockaddr_un*>(&found.storage)->sun_path[0], '\0');
  for (const std::string& name : {std::string(), longest + "x"}) {
    const auto refused = resolve({Address::Kind::kUnix, name, 0});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  }
}

// A name with a blank does not resolve, without a request to a name server.
TEST(SocketAddress, AHostThatDoesNotResolveIsNamed) {
  const auto missing = resolve({Address::Kind::kTcp, "no name", 1});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(missing.error().message().find("host name \"no name\" does not resolve"),
            std::string::npos)
      << missing.error().message();
}

TEST(SocketAddress, ASocketKnowsItsOwnNameAndNotThatOfAPeerThatIsNotThere) {
  const Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_TRUE(socket.is_open());
  const std::string name = "cadre-address-test-" + std::to_string(::getpid());
  SocketAddress own = resolve({Address::Kind::kUnix, name, 0}).value_or_throw().front();
  ASSERT_EQ(::bind(socket.get(), own.get(), own.size), 0);
  EXPECT_EQ(local_address_of(socket.get()), (Address{Address::Kind::kUnix, name, 0}));
  EXPECT_EQ(peer_address_of(socket.get()), Address{});
}

}  // namespace
}  // namespace cadre::os
