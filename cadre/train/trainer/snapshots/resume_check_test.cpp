#include "cadre/train/trainer/snapshots/resume_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/testing/core/ranks.h"

namespace cadre::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string refusal(const Config& before, const Config& now) {
  return cadre::testing::failure_of([&] { check_resumed_config(before, now); });
}

TEST(ResumeCheck, ChangesAreListedAndSomeAreWarnedOf) {
  const Config before;
  EXPECT_THAT(check_resumed_config(before, before), IsEmpty());
  Config now;
  now.run.seed = before.run.seed + 1;
  now.optimizer.learning_rate = 0.25;
  const auto messages = check_resumed_config(before, now);
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_THAT(messages[0], AllOf(HasSubstr("changed since the snapshot: "),
                                 HasSubstr("optimizer.learning_rate "), HasSubstr(" -> 0.25"),
                                 HasSubstr("run.seed ")));
  EXPECT_THAT(messages[1], HasSubstr("warning: run.seed has changed: "));
}

TEST(ResumeCheck, WhatHasNoEffectIsNoChange) {
  const Config before;
  Config now;
  now.run.name = "another";
  now.optimizer.rho = 0.5;  // only adadelta uses this key, so its change is ignored
  EXPECT_THAT(check_resumed_config(before, now), IsEmpty());
  now.optimizer.kind = "adadelta";
  EXPECT_THAT(refusal(before, now),
              AllOf(HasSubstr("kInvalidArgument: optimizer.kind was "),
                    HasSubstr("now: the saved states are those of another optimizer"),
                    HasSubstr("run.resume=none")));
}

TEST(ResumeCheck, AMomentumThatBeginsOrEndsIsRefused) {
  Config without;
  without.optimizer.kind = "sgd";
  without.optimizer.momentum = 0;
  Config with = without;
  with.optimizer.momentum = 0.9;
  EXPECT_THAT(refusal(without, with), HasSubstr("those of an optimizer without momentum"));
  EXPECT_THAT(refusal(with, without), HasSubstr("those of an optimizer with momentum"));
  Config other = with;
  other.optimizer.momentum = 0.5;
  EXPECT_THAT(check_resumed_config(with, other),
              ElementsAre(HasSubstr("optimizer.momentum 0.9 -> 0.5")));
}

}  // namespace
}  // namespace cadre::train
