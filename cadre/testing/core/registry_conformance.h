// The tests that every CoordinatorRegistry must pass. A harness has open(), which opens the
// registry of job "bert" once more, as another agent would; die(), which ends the agent of a
// registry as SIGKILL would; and write(), which puts a text in the place of the claim.
//
// Threads: those of the tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/launch/hosts/registry.h"

namespace cadre::launch {

template <typename Harness>
class RegistryConformance : public ::testing::Test {
 protected:
  using Registry = std::unique_ptr<CoordinatorRegistry>;

  void SetUp() override {
    const std::string obstacle = Harness::obstacle();
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
    harness_ = std::make_unique<Harness>(*system_);
  }

  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }
  static Claim claim_of(AgentId agent, uint64_t epoch = 0, uint64_t round = 0) {
    return {.agent = agent,
            .epoch = epoch,
            .round = round,
            .address = "10.0.0." + std::to_string(agent) + ":29"};
  }
  std::optional<Claim> claim(const Registry& registry, const Claim& own) {
    return registry->claim(own, soon()).value_or_throw();
  }
  std::optional<Claim> find() { return harness_->open()->find(soon()).value_or_throw(); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  std::unique_ptr<Harness> harness_;
};

TYPED_TEST_SUITE_P(RegistryConformance);

TYPED_TEST_P(RegistryConformance, TheFirstClaimIsInForceUntilItIsReleased) {
  EXPECT_EQ(this->find(), std::nullopt);
  const auto first = this->harness_->open();
  const auto second = this->harness_->open();
  const Claim own = this->claim_of(1);
  EXPECT_EQ(this->claim(first, own), own);
  EXPECT_EQ(this->claim(second, this->claim_of(2)), own);
  EXPECT_EQ(this->claim(first, own), own);
  EXPECT_EQ(this->find(), own);
  EXPECT_TRUE(second->release(2, this->soon()).ok());
  EXPECT_EQ(this->find(), own);
  EXPECT_TRUE(first->release(1, this->soon()).ok());
  EXPECT_EQ(this->find(), std::nullopt);
  EXPECT_TRUE(first->release(1, this->soon()).ok());
  EXPECT_EQ(this->claim(second, this->claim_of(2)), this->claim_of(2));
}

TYPED_TEST_P(RegistryConformance, OfManyThatClaimAtOnceOneWins) {
  constexpr AgentId kNumAgents = 8;
  std::vector<std::unique_ptr<CoordinatorRegistry>> registries;
  for (AgentId id = 0; id < kNumAgents; ++id) registries.push_back(this->harness_->open());
  std::vector<std::optional<Claim>> answers(kNumAgents);
  std::vector<std::thread> threads;
  for (AgentId id = 0; id < kNumAgents; ++id) {
    threads.emplace_back([&, id] {
      while (!answers[id]) answers[id] = this->claim(registries[id], this->claim_of(id + 1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& answer : answers) EXPECT_EQ(answer, answers[0]);
  EXPECT_EQ(this->find(), answers[0]);
}

TYPED_TEST_P(RegistryConformance, OnlyAClaimThatKnowsMoreReplacesOneOfALivingAgent) {
  const auto first = this->harness_->open();
  const auto second = this->harness_->open();
  const Claim own = this->claim_of(1, 1, 3);
  EXPECT_EQ(this->claim(first, this->claim_of(1)), this->claim_of(1));
  EXPECT_EQ(this->claim(first, own), own);
  for (const Claim& weaker : {this->claim_of(2), this->claim_of(2, 9, 0), this->claim_of(2, 9, 2),
                              this->claim_of(2, 1, 3)}) {
    EXPECT_EQ(this->claim(second, weaker), own) << weaker.epoch << " " << weaker.round;
  }
  const Claim successor = this->claim_of(2, 2, 3);
  EXPECT_EQ(this->claim(second, successor), successor);
  EXPECT_EQ(this->claim(first, own), successor);
  EXPECT_TRUE(first->release(1, this->soon()).ok());
  EXPECT_EQ(this->find(), successor);
}

TYPED_TEST_P(RegistryConformance, TheClaimOfADeadAgentIsTakenOver) {
  auto first = this->harness_->open();
  const auto second = this->harness_->open();
  // The agent of a job that ended uncleanly knew a round. The next job of this name begins anew.
  const Claim dead = this->claim_of(1, 5, 7);
  EXPECT_EQ(this->claim(first, dead), dead);
  this->harness_->die(std::move(first));
  const Deadline deadline = this->soon();
  std::optional<Claim> answer;
  while (answer != this->claim_of(2)) {
    ASSERT_FALSE(deadline.has_passed(this->system_->now()));
    answer = this->claim(second, this->claim_of(2));
    this->system_->make_waiter()->park(this->system_->deadline_in(std::chrono::milliseconds(100)));
  }
  EXPECT_EQ(this->find(), answer);
}

TYPED_TEST_P(RegistryConformance, ATextThatIsNoClaimOfThisJobIsAnError) {
  const auto registry = this->harness_->open();
  const std::string newer =
      R"({"format":"cadre-coordinator","version":2,"job":"bert","leader":"node0"})";
  const std::string other = encode_claim("gpt", this->claim_of(3));
  for (const std::string& text : {std::string(), std::string("node0:29400"), newer, other}) {
    this->harness_->write(text);
    const auto answer = registry->claim(this->claim_of(1, 1, 1), this->soon());
    ASSERT_FALSE(answer.ok()) << text;
    EXPECT_FALSE(registry->find(this->soon()).ok()) << text;
    const auto code = text == other ? ErrorCode::kInvalidArgument : ErrorCode::kCorruption;
    EXPECT_EQ(answer.error().code(), code) << answer.error().message();
  }
}

REGISTER_TYPED_TEST_SUITE_P(RegistryConformance, TheFirstClaimIsInForceUntilItIsReleased,
                            OfManyThatClaimAtOnceOneWins,
                            OnlyAClaimThatKnowsMoreReplacesOneOfALivingAgent,
                            TheClaimOfADeadAgentIsTakenOver, ATextThatIsNoClaimOfThisJobIsAnError);

}  // namespace cadre::launch
