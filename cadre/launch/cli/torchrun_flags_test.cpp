#include "cadre/launch/cli/torchrun_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  EXPECT_EQ(said(check_refused_flag(given("--logs-specs", ""))), "accepted");
  EXPECT_EQ(said(check_refused_flag(given("--logs-specs", "default"))), "accepted");
  EXPECT_THAT(said(check_refused_flag(given("--logs-specs", "0"))), StartsWith("--logs-specs 0: "));
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

TEST_F(TorchrunFlagsTest, StoppingSignalsAreChosenByTheirNames) {
  const auto parsed = [](std::string value) {
    return parse_stop_signals(given("--signals-to-handle", std::move(value)));
  };
  EXPECT_EQ(*parsed("SIGTERM,SIGUSR1"), (std::vector<int>{SIGTERM, SIGUSR1}));
  EXPECT_EQ(*parsed("SIGUSR2,SIGQUIT,SIGHUP,SIGINT"),
            (std::vector<int>{SIGUSR2, SIGQUIT, SIGHUP, SIGINT}));
  for (const char* wrong : {"SIGALRM", "sigterm", "15", "SIGKILL"}) {
    EXPECT_THAT(parsed(std::string("SIGTERM,") + wrong).error().message(),
                HasSubstr(std::string(": \"") + wrong + "\" is not among the signals"));
  }
}

}  // namespace
}  // namespace cadre::cli
