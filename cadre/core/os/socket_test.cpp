#include "cadre/core/os/socket.h"

#include <gtest/gtest.h>

namespace cadre::os {
namespace {

TEST(Address, ReadsWhatItWrites) {
  const Address cases[] = {{Address::Kind::kTcp, "127.0.0.1", 29500},
                           {Address::Kind::kTcp, "::1", 0},
                           {Address::Kind::kTcp, "node0.cluster", 65535},
                           {Address::Kind::kUnix, "job-17:a", 0}};
  for (const Address& address : cases) {
    EXPECT_EQ(Address::parse(address.to_string()).value_or_throw(), address);
  }
  EXPECT_EQ(cases[1].to_string(), "tcp:[::1]:0");
  EXPECT_EQ(cases[3].to_string(), "unix:@job-17:a");
}

TEST(Address, RefusesOtherTextsAndQuotesThem) {
  const std::string too_long = "unix:@" + std::string(108, 'x');
  for (const std::string& text :
       {std::string(), std::string("127.0.0.1:80"), std::string("udp:127.0.0.1:80"),
        std::string("tcp:127.0.0.1"), std::string("tcp::80"), std::string("tcp:host:"),
        std::string("tcp:host:65536"), std::string("tcp:host:-1"), std::string("tcp:host:80x"),
        std::string("tcp:::1:80"), std::string("tcp:[]:80"), std::string("unix:@"),
        std::string("unix:/path"), too_long}) {
    const auto result = Address::parse(text);
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_EQ(result.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(result.error().message().find("\"" + text + "\""), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::os
