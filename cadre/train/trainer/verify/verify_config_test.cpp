// Tests `cadre verify` with layouts that divide the model. It runs in float64, where the effect of
// a defect is a billion times as large as rounding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/verify/layout_cases.h"
#include "cadre/train/trainer/verify/verify_config.h"

namespace cadre::train {
namespace {

using ::testing::Contains;
using ::testing::Not;

class VerifyLayouts : public TrainerTest {
 protected:
  Config gpt(bool is_tied) const {
    Config config = this->config("verified");
    config.model = {
        .layers = 4, .heads = 4, .width = 16, .context = 16, .dropout_rate = 0.1, .tied = is_tied};
    config.run.global_batch_size = 8;
    return config;
  }

  Config experts(bool is_tied) const {
    Config config = gpt(is_tied);
    config.model.experts = 4;
    config.model.auxiliary_loss = 0.1;
    return config;
  }

  VerifyReport verify(const Config& config, int world_size, const VerifyRequest& request) {
    VerifyReport report;
    const auto ranks =
        testing::run_groups(world_size, [&](const ProcessGroup& group, std::string&) {
          const auto system = os::make_native_system();
          const VerifyReport own =
              verify_config(config, request,
                            {.world = group, .system = *system, .print = [](std::string_view) {}});
          if (group.rank() == 0) report = own;
        });
    EXPECT_EQ(ranks.failures(), "");
    return report;
  }

  static std::vector<std::string> names(const Config& config, int world_size) {
    std::vector<std::string> names;
    for (const StrategyCase& layout : layout_cases(config, world_size).possible) {
      names.push_back(name_of(layout, world_size));
    }
    return names;
  }

  // Verifies all layouts of world_size ranks that divide the model, and only those.
  void expect_layouts_within(const Config& config, int world_size, int64_t num_steps) {
    expect_within(config, world_size, num_steps, names(config, world_size));
  }

  void expect_within(const Config& config, int world_size, int64_t num_steps,
                     const std::vector<std::string>& layouts) {
    SCOPED_TRACE(world_size);
    const VerifyReport report = verify(
        config, world_size, {.num_steps = num_steps, .dtype = "float64", .strategies = layouts});
    // A name also selects layouts whose names begin with it: tp-2 also selects tp-2-sequence.
    EXPECT_GE(report.strategies.size(), layouts.size());
    for (const std::string& layout : layouts) {
      EXPECT_THAT(report.strategies,
                  Contains(::testing::Field("strategy", &StrategyReport::strategy, layout)));
    }
    EXPECT_TRUE(report.is_within()) << report.to_text();
  }
};

TEST_F(VerifyLayouts, AreThoseThatTheModelAndTheProcessesAllow) {
  EXPECT_EQ(names(gpt(true), 2),
            (std::vector<std::string>{"ddp/tp-2", "ddp/tp-2-sequence", "ddp/cp-2", "ddp/pp-2"}));
  const std::vector<std::string> of_8 = names(gpt(true), 8);
  for (const char* name : {"ddp/pp-2/tp-2", "fsdp/pp-2/tp-2", "ddp/pp-2/cp-2/tp-2",
                           "hsdp-2x2/after_forward/tp-2", "zero2/cp-2", "ddp/cp-8"}) {
    EXPECT_THAT(of_8, Contains(name));
  }
  EXPECT_THAT(of_8, Not(Contains("ddp/tp-8"))) << "8 ranks cannot divide 4 heads";
  EXPECT_THAT(of_8, Not(Contains("zero1/pp-2")));
  Config own = gpt(true);
  own.parallel = {.strategy = "fsdp", .tensor = 4};
  EXPECT_THAT(names(own, 8), Contains("fsdp/after_forward/tp-4"));
  own.model.kind = "mlp";
  own.parallel = {};
  EXPECT_TRUE(names(own, 8).empty());
}

TEST_F(VerifyLayouts, OfExpertsAreWithoutPipelines) {
  EXPECT_EQ(names(experts(true), 2),
            (std::vector<std::string>{"ddp/tp-2", "ddp/cp-2", "ddp/ep-2"}));
  const std::vector<std::string> of_8 = names(experts(true), 8);
  for (const char* name : {"ddp/ep-2", "zero1/ep-2", "fsdp/after_forward/ep-2/cp-2",
                           "hsdp-2x2/after_forward/ep-2", "ddp/ep-2/cp-2/tp-2"}) {
    EXPECT_THAT(of_8, Contains(name));
  }
  EXPECT_THAT(of_8, Not(Contains("ddp/ep-8"))) << "8 ranks cannot divide 4 experts";
  Config own = experts(true);
  own.parallel.expert = 4;
  EXPECT_THAT(names(own, 8), Contains("ddp/ep-4"));
}

TEST_F(VerifyLayouts, OfExpertsTrainAsOneProcessDoes) {
  expect_layouts_within(experts(true), 2, 3);
  expect_layouts_within(experts(false), 4, 3);
}

TEST_F(VerifyLayouts, ExpertsOfACapacityDropTheChoicesOfOneProcess) {
  Config config = experts(true);
  config.model.capacity_factor = 0.75;
  const std::vector<std::string> names = this->names(config, 4);
  EXPECT_THAT(names, Not(Contains("ddp/cp-2")));
  expect_layouts_within(config, 4, 3);
}

// Must also hold if each process has all experts, because the routers still use the token counts of
// all processes.
TEST_F(VerifyLayouts, StrategiesOfExpertsTrainAsOneProcessDoes) {
  const VerifyReport report = verify(experts(true), 4, {.num_steps = 3, .dtype = "float64"});
  EXPECT_TRUE(report.is_within()) << report.to_text();
  EXPECT_GT(report.strategies.size(), names(experts(true), 4).size());
}

TEST_F(VerifyLayouts, TrainAsOneProcessDoes) {
  expect_layouts_within(gpt(true), 2, 3);
  expect_layouts_within(gpt(false), 4, 3);
}

// The layout of the configuration cannot run, so it was not verified, and the report must say so.
TEST_F(VerifyLayouts, AConfigurationThatCannotRunIsReportedAsNotRun) {
  Config config = gpt(true);
  config.model.layers = 2;
  config.parallel = {.pipeline = 2, .microbatches = 3};
  const VerifyRequest some{.num_steps = 1, .dtype = "float64", .strategies = {"ddp"}};
  const VerifyReport report = verify(config, 2, some);
  const auto own = std::ranges::find(report.strategies, "ddp/pp-2", &StrategyReport::strategy);
  ASSERT_NE(own, report.strategies.end()) << report.to_text();
  EXPECT_THAT(own->not_run, ::testing::HasSubstr("parallel.microbatches is 3, which does not "));
  EXPECT_FALSE(report.is_within());
  EXPECT_THAT(json_of(report, some), ::testing::HasSubstr("\"verdict\": \"not run\""));
  config.parallel = {.tensor = 4};
  const LayoutCases cases = layout_cases(config, 2);
  ASSERT_FALSE(cases.impossible.empty());
  EXPECT_TRUE(cases.impossible[0].is_own);
  EXPECT_EQ(name_of(cases.impossible[0].strategy, 2), "ddp/tp-4");
  EXPECT_THAT(cases.impossible[0].reason, ::testing::HasSubstr("tensor 4 takes 4 processes"));
  config.parallel = {.strategy = "hsdp", .replicas = 3};
  EXPECT_EQ(name_of(layout_cases(config, 4).impossible[0].strategy, 4), "hsdp-3x1/after_forward");
}

// The layout of the configuration is verified with its own settings and its own accumulation, not
// with the defaults of its strategy.
TEST_F(VerifyLayouts, TheOwnLayoutIsThatOfTheConfiguration) {
  Config own = gpt(true);
  own.parallel = {.strategy = "fsdp", .reshard = "after_backward", .tensor = 2};
  own.run.accumulate = 2;
  const std::vector<std::string> names = this->names(own, 4);
  EXPECT_EQ(names[0], "fsdp/after_backward/tp-2");
  EXPECT_EQ(names[1], "fsdp/after_backward/accumulate/tp-2");
}

TEST_F(VerifyLayouts, SmallChangesThatWouldAllowALayoutAreNamed) {
  Config config = gpt(true);
  config.model.layers = 5;
  const auto changes = [](const Config& of, int world_size) {
    std::map<std::string, std::string> by_name;
    for (const ImpossibleLayout& layout : layout_cases(of, world_size).impossible) {
      if (!layout.change.empty()) by_name[name_of(layout.strategy, world_size)] = layout.change;
    }
    return by_name;
  };
  using Changes = std::map<std::string, std::string>;
  EXPECT_EQ(changes(config, 2), (Changes{{"ddp/pp-2", "model.layers=6"}}));
  EXPECT_EQ(changes(gpt(true), 2), Changes());
  EXPECT_EQ(changes(gpt(true), 8).at("ddp/tp-8"), "model.heads=8");
  std::string printed;
  VerifyReport report;
  const auto ranks = testing::run_groups(2, [&](const ProcessGroup& group, std::string&) {
    const auto system = os::make_native_system();
    Config small = config;
    small.model.layers = 1;
    const VerifyReport own =
        verify_config(small, {.num_steps = 1, .dtype = "float64"},
                      {.world = group, .system = *system, .print = [&](std::string_view text) {
                         if (group.rank() == 0) printed += text;
                       }});
    if (group.rank() == 0) report = own;
  });
  EXPECT_EQ(ranks.failures(), "");
  EXPECT_TRUE(report.is_within()) << report.to_text();
  ASSERT_EQ(report.near.size(), 1U);
  EXPECT_EQ(report.near[0].change, "model.layers=2");
  EXPECT_THAT(printed, ::testing::HasSubstr("  with model.layers=2: ddp/pp-2\n"));
}

TEST_F(VerifyLayouts, WhatIsNotSelectedIsCounted) {
  const VerifyReport report =
      verify(gpt(true), 2, {.num_steps = 1, .dtype = "float64", .strategies = {"zero1"}});
  EXPECT_EQ(report.strategies.size(), 2U);
  EXPECT_EQ(report.num_not_selected, 16);
  Config odd = gpt(true);
  odd.model.layers = 1;
  const VerifyReport asked =
      verify(odd, 2, {.num_steps = 1, .dtype = "float64", .strategies = {"ddp/pp-2"}});
  ASSERT_EQ(asked.strategies.size(), 1U);
  EXPECT_THAT(asked.strategies[0].not_run, ::testing::HasSubstr("1 blocks of model.layers"));
  EXPECT_FALSE(asked.is_within());
}

struct VerifiedGpt {
  bool is_tied;
  int world_size;
  bool has_experts = false;
};

std::ostream& operator<<(std::ostream& out, const VerifiedGpt& given) {
  return out << (given.is_tied ? "tied" : "untied") << (given.has_experts ? "_experts" : "")
             << "_on_" << given.world_size;
}

std::vector<VerifiedGpt> verified_gpts() {
  return {{false, 8},       {true, 4},  {false, 2}, {true, 4, true}, {true, 8},
          {false, 8, true}, {false, 4}, {true, 2},  {false, 2, true}};
}

// The seed CADRE_CASES_SEED chooses which of the models and layouts CTest runs.
class VerifyLayoutsEquality : public VerifyLayouts,
                              public ::testing::WithParamInterface<VerifiedGpt> {};

TEST_P(VerifyLayoutsEquality, OfTwentySteps) {
  const VerifiedGpt& given = GetParam();
  const Config config = given.has_experts ? experts(given.is_tied) : gpt(given.is_tied);
  const std::vector<std::string> layouts = names(config, given.world_size);
  std::vector<std::string> chosen = testing::share_of(layouts);
  if (chosen.empty()) chosen.push_back(layouts.front());
  expect_within(config, given.world_size, 20, chosen);
}

INSTANTIATE_TEST_SUITE_P(Cases, VerifyLayoutsEquality,
                         ::testing::ValuesIn(testing::share_of(verified_gpts())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre::train
