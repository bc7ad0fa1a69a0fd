#include "cadre/testing/core/reserved_port.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>

#include "cadre/core/os/system.h"

namespace cadre::testing {
namespace {

// Returns the errno of binding another socket to the port, without SO_REUSEADDR.
int errno_of_bind(uint16_t port) {
  const os::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  return ::bind(socket.get(), generic, sizeof(address)) == 0 ? 0 : errno;
}

TEST(ReservedPort, BelongsToItsServerAlone) {
  const auto system = os::make_native_system();
  uint16_t number = 0;
  {
    const ReservedPort port;
    number = port.number();
    const os::Address address{os::Address::Kind::kTcp, "127.0.0.1", number};
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(errno_of_bind(number), EADDRINUSE);
      const auto refused = system->connect(address, system->deadline_in(std::chrono::seconds(5)));
      ASSERT_FALSE(refused.ok());
      EXPECT_TRUE(refused.error().details().is_refused);
      EXPECT_TRUE(system->listen(address).ok());
    }
  }
  EXPECT_EQ(errno_of_bind(number), 0);
}

TEST(ReservedPort, OfAnAddressThatThisHostDoesNotHaveIsAnError) {
  EXPECT_THROW(ReservedPort("192.0.2.1"), Error);
}

}  // namespace
}  // namespace cadre::testing
