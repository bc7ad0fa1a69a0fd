#include "cadre/core/store/tcp/greeting.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre::store {
namespace {

TEST(Greeting, AHelloHasTheBuildAndTheNonce) {
  wire::Nonce nonce{};
  nonce[0] = std::byte{1};
  nonce[31] = std::byte{0xff};
  const wire::StoreRequest hello = hello_of_client(nonce);
  EXPECT_EQ(hello.verb, wire::StoreVerb::kHello);
  EXPECT_EQ(hello.amount, wire::kStoreProtocol);
  ASSERT_EQ(hello.keys.size(), 1U);
  EXPECT_EQ(hello.keys[0], this_build());
  ASSERT_EQ(hello.values.size(), 1U);
  EXPECT_EQ(read_nonce(hello.values[0]).value_or_throw(), nonce);
}

TEST(Greeting, ANonceOfAnotherLengthIsCorruption) {
  for (const size_t length : {0, 31, 33}) {
    const auto nonce = read_nonce(std::string(length, 'n'));
    ASSERT_FALSE(nonce.ok()) << length;
    EXPECT_EQ(nonce.error().code(), ErrorCode::kCorruption);
  }
}

TEST(Greeting, AnotherBuildOrProtocolIsRefusedWithBoth) {
  EXPECT_TRUE(check_same_build({.name = "1.2"}, {.name = "1.2"}).ok());
  const Status build =
      check_same_build({.name = "1.2", .protocol = 4}, {.name = "1.3", .protocol = 4});
  ASSERT_FALSE(build.ok());
  EXPECT_EQ(build.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(build.error().message(),
            "the store server runs cadre 1.2 (store protocol 4), this rank cadre 1.3 (store "
            "protocol 4); run one build on all ranks and on the launcher");
  EXPECT_FALSE(
      check_same_build({.name = "1.2", .protocol = 4}, {.name = "1.2", .protocol = 5}).ok());
}

// The name of a build comes from a client without a proof and is shown in logs and terminals, so
// control characters in it must be escaped.
TEST(Greeting, TheNameOfABuildCannotForgeALine) {
  const Status build = check_same_build({.name = "1.2"}, {.name = "1\nerror \x1b[31m"});
  ASSERT_FALSE(build.ok());
  EXPECT_NE(build.error().message().find("cadre 1\\x0aerror \\x1b[31m"), std::string::npos)
      << build.error().message();
}

}  // namespace
}  // namespace cadre::store
