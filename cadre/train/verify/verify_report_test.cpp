// Tests when a report counts as within the bounds, and its text.
#include "cadre/train/verify/verify_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cadre {
namespace {

using ::testing::HasSubstr;

// If one strategy deviates or fails in one respect, the whole report must not be within the bounds.
TEST(VerifyReport, IsWithinWhereEveryDeviationOfEveryStrategyIs) {
  const Deviation within{.difference = 1e-6, .bound = 1e-5, .name = {}, .step = 1};
  const Deviation beyond{.difference = 1.1e-5, .bound = 1e-5, .name = {}, .step = 1};
  const StrategyReport good{.loss = within, .gradients = within, .parameters = within};
  const auto report_with = [&](const StrategyReport& strategy) {
    return VerifyReport{.world_size = 2, .num_steps = 1, .strategies = {good, strategy, good}};
  };
  EXPECT_TRUE(report_with(good).is_within());
  for (const auto part : {&StrategyReport::loss, &StrategyReport::gradients,
                          &StrategyReport::parameters, &StrategyReport::buffers}) {
    StrategyReport bad = good;
    bad.*part = beyond;
    EXPECT_FALSE(bad.is_within());
    EXPECT_FALSE(report_with(bad).is_within());
    if (part == &StrategyReport::buffers) continue;
    bad.*part = {};
    EXPECT_FALSE(bad.is_within()) << "no value was compared";
  }
  StrategyReport failed = good;
  failed.error = "rank 1: out of luck";
  EXPECT_FALSE(report_with(failed).is_within());
  StrategyReport not_run;
  not_run.not_run = "the batch has 3 rows";
  EXPECT_FALSE(report_with(not_run).is_within());
  EXPECT_THAT(report_with(not_run).to_text(), HasSubstr("not run\n    the batch has 3 rows\n"));
  EXPECT_FALSE(VerifyReport{}.is_within()) << "no strategy has run";
}

}  // namespace
}  // namespace cadre
