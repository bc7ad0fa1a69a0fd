#include "cadre/launch/cli/etcd/etcd_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "cadre/testing/core/etcd_server.h"
#include "cadre/testing/core/registry_conformance.h"

namespace cadre::cli {
namespace {

using testing::EtcdServer;
using ::testing::HasSubstr;

constexpr Duration kSoon = std::chrono::seconds(20);

class EtcdHarness {
 public:
  static std::string obstacle() { return EtcdServer::obstacle(); }
  explicit EtcdHarness(os::System& system) : system_(system) {}

  std::unique_ptr<launch::CoordinatorRegistry> open() {
    return std::make_unique<EtcdRegistry>(client(), "bert");
  }
  // etcd ends the lease when it has not been renewed for long enough.
  void die(std::unique_ptr<launch::CoordinatorRegistry> registry) { registry.reset(); }
  void write(const std::string& text) {
    const Deadline deadline = system_.deadline_in(kSoon);
    EtcdClient writer = client();
    const std::string key = claim_key("bert");
    const auto entry = writer.get(key, deadline).value_or_throw();
    ASSERT_TRUE(
        writer.put_if(key, entry ? entry->revision : 0, text, 0, deadline).value_or_throw());
  }
  EtcdClient client() {
    return EtcdClient::make(system_, {.address = server_.address()}).value_or_throw();
  }
  EtcdServer& server() { return server_; }

 private:
  os::System& system_;
  EtcdServer server_;
};

class EtcdRegistryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string obstacle = EtcdServer::obstacle();
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    harness_ = std::make_unique<EtcdHarness>(*system_);
  }
  Deadline soon() { return system_->deadline_in(kSoon); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  std::unique_ptr<EtcdHarness> harness_;
};

TEST_F(EtcdRegistryTest, AKeyIsOnlyWrittenIfItHasNotChanged) {
  EtcdClient client = harness_->client();
  const std::string value("a\0b\xff", 4);
  EXPECT_EQ(client.get("key", soon()).value_or_throw(), std::nullopt);
  EXPECT_TRUE(client.put_if("key", 0, value, 0, soon()).value_or_throw());
  EXPECT_FALSE(client.put_if("key", 0, "other", 0, soon()).value_or_throw());
  const auto entry = client.get("key", soon()).value_or_throw();
  ASSERT_TRUE(entry);
  EXPECT_EQ(entry->value, value);
  EXPECT_TRUE(client.put_if("key", entry->revision, "next", 0, soon()).value_or_throw());
  EXPECT_FALSE(client.put_if("key", entry->revision, "other", 0, soon()).value_or_throw());
  EXPECT_EQ(client.get("key", soon()).value_or_throw()->value, "next");
}

TEST_F(EtcdRegistryTest, AKeyEndsWithItsLease) {
  EtcdClient client = harness_->client();
  const auto lease = client.grant_lease(60, soon()).value_or_throw();
  ASSERT_TRUE(client.put_if("key", 0, "value", lease, soon()).value_or_throw());
  EXPECT_TRUE(client.keep_lease(lease, soon()).value_or_throw());
  EXPECT_TRUE(client.revoke_lease(lease, soon()).ok());
  EXPECT_FALSE(client.keep_lease(lease, soon()).value_or_throw());
  EXPECT_EQ(client.get("key", soon()).value_or_throw(), std::nullopt);
}

// etcd answers with a status that is not 200 and a JSON object.
TEST_F(EtcdRegistryTest, AnErrorOfTheServerIsNoAnswer) {
  EtcdClient client = harness_->client();
  const auto lease = client.grant_lease(60, soon()).value_or_throw();
  ASSERT_TRUE(client.revoke_lease(lease, soon()).ok());
  const auto written = client.put_if("key", 0, "value", lease, soon());
  ASSERT_FALSE(written.ok());
  EXPECT_EQ(written.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(written.error().message(), HasSubstr("requested lease not found"));
  const Status revoked = client.revoke_lease(lease, soon());
  ASSERT_FALSE(revoked.ok());
  EXPECT_THAT(revoked.error().message(), HasSubstr("requested lease not found"));
}

// A claim that comes back after its lease has ended has been written again.
TEST_F(EtcdRegistryTest, AClaimThatIsRenewedStaysForLongerThanALease) {
  EtcdRegistry registry(harness_->client(), "bert");
  const launch::Claim own{.agent = 1, .address = "node0:1"};
  ASSERT_EQ(*registry.claim(own, soon()), own);
  EtcdClient client = harness_->client();
  const auto first = client.get(claim_key("bert"), soon()).value_or_throw();
  const TimePoint began = system_->now();
  TimePoint last = began;
  Duration longest_gap{};
  while (last - began < EtcdRegistry::kLease + std::chrono::seconds(3)) {
    system_->make_waiter()->park(system_->deadline_in(std::chrono::milliseconds(500)));
    ASSERT_EQ(*registry.claim(own, soon()), own);
    longest_gap = std::max(longest_gap, system_->now() - last);
    last = system_->now();
  }
  if (longest_gap > registry.validity()) GTEST_SKIP() << "the machine stood still";
  EXPECT_EQ(client.get(claim_key("bert"), soon()).value_or_throw(), first);
}

TEST_F(EtcdRegistryTest, AClaimComesBackAfterItsLeaseWasRevoked) {
  EtcdRegistry registry(harness_->client(), "bert");
  const launch::Claim own{.agent = 1, .address = "node0:1"};
  ASSERT_EQ(*registry.claim(own, soon()), own);
  EtcdClient client = harness_->client();
  const auto entry = client.get(claim_key("bert"), soon()).value_or_throw();
  ASSERT_TRUE(client.revoke_lease(entry->lease, soon()).ok());
  EXPECT_EQ(*registry.claim(own, soon()), own);
  EXPECT_EQ(*registry.find(soon()), own);
}

TEST_F(EtcdRegistryTest, AServerThatDoesNotAnswerIsNamedAndFoundAgain) {
  EtcdRegistry registry(harness_->client(), "bert");
  const launch::Claim own{.agent = 1, .address = "node0:1"};
  ASSERT_EQ(*registry.claim(own, soon()), own);
  harness_->server().freeze();
  const auto stopped = registry.claim(own, system_->deadline_in(std::chrono::milliseconds(200)));
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code(), ErrorCode::kTimeout);
  harness_->server().stop();
  const auto killed = registry.claim(own, soon());
  ASSERT_FALSE(killed.ok());
  EXPECT_EQ(killed.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(killed.error().message(), HasSubstr(harness_->server().address()));
  harness_->server().start();
  EXPECT_EQ(*registry.claim(own, soon()), own);
}

// An HTTP server that is no etcd: this etcd's address for its peers.
TEST_F(EtcdRegistryTest, AnotherServiceIsNotTakenForEtcd) {
  auto client = EtcdClient::make(*system_, {.address = harness_->server().peer_address()});
  ASSERT_TRUE(client.ok());
  const auto entry = client->get("key", soon());
  ASSERT_FALSE(entry.ok());
  EXPECT_THAT(entry.error().message(), HasSubstr("is it etcd, version 3.4 or newer?"));
}

}  // namespace
}  // namespace cadre::cli

namespace cadre::launch {
INSTANTIATE_TYPED_TEST_SUITE_P(Etcd, RegistryConformance, cli::EtcdHarness);
}  // namespace cadre::launch
