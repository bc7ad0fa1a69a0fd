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
  EXPECT_EQ(check("timeout=900,is_host=1,store_type=tcp,rank=0,protocol=https,"), "accepted");
  for (const char* wrong : {"is_host=0", "rank=1", "store_type=file", "timeouts=3"}) {
    EXPECT_THAT(check(std::string("timeout=3,") + wrong),
                HasSubstr(std::string(": \"") + wrong + "\" is no setting"));
  }
}

TEST_F(TorchrunFlagsTest, ASettingOfARendezvousNeedsAValue) {
  RunOptions options;
  for (const char* wrong : {"is_host", "timeout", "join_timeout", "join_timeout=", "="}) {
    const GivenOption option = given("--rdzv-conf", std::string("read_timeout=3,") + wrong);
    const std::string expected = std::string(": \"") + wrong + "\": expected a value";
    EXPECT_THAT(said(check_rendezvous_settings(option)), HasSubstr(expected));
    EXPECT_THAT(said(take_rendezvous_settings(option, options)), HasSubstr(expected));
  }
}

TEST_F(TorchrunFlagsTest, SettingsForSeveralHostsAreTakenOrRefusedByName) {
  RunOptions options;
  const launch::HostsSpec& spec = options.several;
  const auto take = [&](std::string value) {
    return said(take_rendezvous_settings(given("--rdzv-conf", std::move(value)), options));
  };
  EXPECT_EQ(take("join_timeout=9,last_call_timeout=0,keep_alive_interval=2,"
                 "keep_alive_max_attempt=3,is_host=0,on_half=continue,store_type=tcp,timeout=5"),
            "accepted");
  EXPECT_EQ(spec.join_timeout, std::chrono::seconds(9));
  EXPECT_EQ(spec.last_call_timeout, Duration{});
  EXPECT_EQ(spec.keep_alive_interval, std::chrono::seconds(2));
  EXPECT_EQ(spec.keep_alive_max_attempt, 3);
  EXPECT_EQ(spec.is_endpoint_host, std::optional(false));
  EXPECT_TRUE(spec.continues_with_half);
  for (const char* wrong :
       {"rank=1", "store_type=file", "is_host=2", "join_timeout=0", "keep_alive_max_attempt=0",
        "on_half=maybe", "timeouts=3", "protocol=http"}) {
    EXPECT_THAT(take(wrong), HasSubstr(std::string(": \"") + wrong + "\": expected")) << wrong;
  }
}

TEST_F(TorchrunFlagsTest, SettingsOfEtcdHaveTheNamesOfBothOfTorchrunsBackEnds) {
  RunOptions options{.backend = RendezvousBackend::kEtcd};
  const auto take = [&](std::string value) {
    return said(take_rendezvous_settings(given("--rdzv-conf", std::move(value)), options));
  };
  EXPECT_EQ(take("protocol=https,cacert=a,cert=b,key=c"), "accepted");
  EXPECT_EQ(options.etcd.protocol, "https");
  EXPECT_EQ(options.etcd.authorities, "a");
  EXPECT_EQ(options.etcd.certificate, "b");
  EXPECT_EQ(options.etcd.private_key, "c");
  EXPECT_EQ(take("ca_cert=d,ssl_cert=e,ssl_cert_key=f,read_timeout=60"), "accepted");
  EXPECT_EQ(options.etcd.authorities + options.etcd.certificate + options.etcd.private_key, "def");
  EXPECT_THAT(take("protocol=ftp"), HasSubstr("expected http or https"));
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
