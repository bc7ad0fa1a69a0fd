// Tests the text of a memory plan, and the table that a run prints at its start.
#include "cadre/train/trainer/planning/plan_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/planning/config_plan.h"

namespace cadre::train::plan_report_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Config config_of_model(const std::string& model, const std::string& data) {
  Config config;
  config.model = {.kind = model, .layers = 2, .heads = 2, .width = 16, .context = 16};
  config.data.kind = data;
  return config;
}

TEST(PlanReport, HasARowForEachStrategyAndTheChosenOnesParts) {
  Config config = config_of_model("gpt", "text");
  config.parallel.strategy = "fsdp";
  const ModelSizes sizes = sizes_of_model(config);
  const auto plans = plans_of_strategies(config, sizes, {.count = 2, .per_host = 2});
  const std::string text = comparison_table(config, sizes, plans);
  EXPECT_THAT(text,
              AllOf(HasSubstr("\n  single "), HasSubstr("\n  zero1 "),
                    HasSubstr("\n* fsdp, after_forward "), HasSubstr("; 2 processes"),
                    HasSubstr("\nunit h_0 to unit h_1, each "), Not(HasSubstr(" buffers  ")),
                    HasSubstr("reduce_scatter"), HasSubstr("; 2 processes (the row single: 1)\n"),
                    HasSubstr("\ntransient: gradients before their reduction.\n")));
  // The legend explains only columns that the table has.
  EXPECT_THAT(text, Not(HasSubstr("full units")));
  config.parallel.form = "gathered";
  const auto gathered = plans_of_strategies(config, sizes, {.count = 2, .per_host = 2});
  EXPECT_THAT(comparison_table(config, sizes, gathered),
              AllOf(HasSubstr("  full units  "), HasSubstr("\nfull units: parameters that are")));
  const nlohmann::json json = nlohmann::json::parse(plans_json(config, sizes, plans));
  ASSERT_EQ(json["strategies"].size(), plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    const MemoryPlan& plan = plans[i].plan;
    EXPECT_EQ(json["strategies"][i]["held_bytes"]["total"], plan.held.total());
    EXPECT_EQ(json["strategies"][i]["held_bytes"]["optimizer_state"], plan.held.optimizer_state);
    EXPECT_EQ(json["strategies"][i]["traffic"]["all_gather"]["received_bytes"],
              plan.traffic.all_gather.received_bytes);
    EXPECT_EQ(json["strategies"][i]["parts"].size(), plan.parts.size());
  }
}

class TrainerPlanTest : public TrainerTest {};

TEST_F(TrainerPlanTest, ARunBeginsWithWhatEachProcessHolds) {
  Config config = this->config("planned");
  config.parallel.strategy = "zero2";
  config.run.steps = 2;
  const Run run = this->run(config, 2);
  ASSERT_EQ(run.failures, "");
  const size_t first = run.screen.find("each process holds");
  ASSERT_NE(first, std::string::npos) << run.screen;
  EXPECT_LT(first, run.screen.find("step 1/2"));
  EXPECT_EQ(run.screen.find("each process holds", first + 1), std::string::npos)
      << "the table was printed twice";
  EXPECT_THAT(run.screen, AllOf(HasSubstr("zero2, MB"), HasSubstr("each step receives"),
                                HasSubstr("1 x reduce_scatter")));
}

}  // namespace
}  // namespace cadre::train::plan_report_test
