// Tests the learning rate of each step.
#include <gtest/gtest.h>

#include "cadre/train/trainer/config/schedule.h"

namespace cadre::train {
namespace {

TEST(Schedule, WarmsUpThenFallsAlongACosine) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 1.0;
  ScheduleConfig schedule;
  schedule.warmup_steps = 10;
  schedule.final_fraction = 0.2;
  const auto rate = [&](int64_t step) { return learning_rate_at(step, 110, optimizer, schedule); };
  EXPECT_DOUBLE_EQ(rate(1), 0.1);
  EXPECT_DOUBLE_EQ(rate(10), 1.0);
  EXPECT_DOUBLE_EQ(rate(60), 0.6);
  EXPECT_DOUBLE_EQ(rate(110), 0.2);
  schedule.kind = "constant";
  EXPECT_DOUBLE_EQ(rate(110), 1.0);
}

TEST(Schedule, TheDefaultWarmUpFitsTheNumberOfSteps) {
  EXPECT_EQ(resolved_warmup_steps({}, 3), 0);
  EXPECT_EQ(resolved_warmup_steps({}, 200), 20);
  EXPECT_EQ(resolved_warmup_steps({}, 100'000), 50);
  EXPECT_EQ(resolved_warmup_steps({.warmup_steps = 7}, 3), 7) << "expected the configured number";
}

// The expected values are those of torch.optim.lr_scheduler.StepLR, stepped once after each update.
TEST(Schedule, FallsInSteps) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 0.8;
  ScheduleConfig schedule{.kind = "step", .warmup_steps = 0, .step_size = 4, .gamma = 0.7};
  double expected = 0.8;
  for (int64_t step = 1; step <= 30; ++step) {
    EXPECT_NEAR(learning_rate_at(step, 30, optimizer, schedule), expected, 1e-15) << step;
    if (step % 4 == 0) expected *= 0.7;
  }
  schedule.warmup_steps = 2;
  EXPECT_DOUBLE_EQ(learning_rate_at(1, 30, optimizer, schedule), 0.4);
}

}  // namespace
}  // namespace cadre::train
