#include "cadre/launch/cli/torchrun_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class TorchrunFlagsTest : public ::testing::Test {
 protected:
  static GivenOption given(std::string_view name, std::string value) {
    return {.name = name, .spelling = std::string(name), .value = std::move(value)};
  }
  static std::string said(const Status& status) {
    return status.ok() ? "accepted" : status.error().message();
  }
};

TEST_F(TorchrunFlagsTest, ARefusedFlagIsAcceptedWithTheValueThatHasNoEffect) {
  EXPECT_EQ(said(check_refused_flag(given("--event-log-handler", ""))), "accepted");
  EXPECT_EQ(said(check_refused_flag(given("--event-log-handler", "null"))), "accepted");
  EXPECT_THAT(said(check_refused_flag(given("--numa-binding", "node"))),
              StartsWith("--numa-binding node: workers are not bound"));
  EXPECT_THAT(said(check_refused_flag(given("--logs-specs", "0"))), StartsWith("--logs-specs 0: "));
  // A switch takes no value, so it has none that makes it harmless and is always an error.
  GivenOption without_value = given("--virtual-local-rank", "");
  without_value.is_switch = true;
  EXPECT_THAT(said(check_refused_flag(without_value)), StartsWith("--virtual-local-rank: "));
}

TEST_F(TorchrunFlagsTest, SettingsOfARendezvousAreTrueOnOneHostOrRefusedByName) {
  const auto check = [](std::string value) {
    return said(check_rendezvous_settings(given("--rdzv-conf", std::move(value))));
  };
  EXPECT_EQ(check(""), "accepted");
  EXPECT_EQ(check("timeout=900,is_host=1,store_type=tcp,rank=0,"), "accepted");
  for (const char* wrong : {"is_host=0", "rank=1", "store_type=file", "timeouts=3", "is_host"}) {
    EXPECT_THAT(check(std::string("timeout=3,") + wrong),
                HasSubstr(std::string(": \"") + wrong + "\" is no setting"));
  }
}

TEST_F(TorchrunFlagsTest, TheFourStoppingSignalsAreHandledInAnyCase) {
  const auto check = [](std::string value) {
    return said(check_handled_signals(given("--signals-to-handle", std::move(value))));
  };
  EXPECT_EQ(check("SIGTERM,SIGINT,SIGHUP,SIGQUIT"), "accepted");
  EXPECT_EQ(check("SIGUSR2,SIGQUIT,SIGHUP,SIGINT,SIGTERM"), "accepted");
  EXPECT_THAT(check("SIGTERM,SIGINT,SIGHUP"), HasSubstr("these signals cannot be chosen"));
  EXPECT_THAT(check("SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGALRM"),
              HasSubstr("these signals cannot be chosen"));
}

}  // namespace
}  // namespace cadre::cli
