// `cadre verify` of the layouts of a model: in float64, where a defect of a layout is a billion
// times larger than rounding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/testing/seeds.h"
#include "cadre/train/trainer_test.h"
#include "cadre/train/verify/layout_cases.h"
#include "cadre/train/verify/verify_config.h"

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
    for (const StrategyCase& layout : layout_cases(config, world_size)) {
      names.push_back(name_of(layout, world_size));
    }
    return names;
  }

  // All layouts of so many ranks, but none of the other strategies.
  void expect_layouts_within(const Config& config, int world_size, int64_t num_steps) {
    SCOPED_TRACE(world_size);
    const std::vector<std::string> layouts = names(config, world_size);
    const VerifyReport report = verify(
        config, world_size, {.num_steps = num_steps, .dtype = "float64", .strategies = layouts});
    EXPECT_EQ(report.strategies.size(), layouts.size());
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
  EXPECT_THAT(of_8, Not(Contains("ddp/tp-8"))) << "4 heads";
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
  EXPECT_THAT(of_8, Not(Contains("ddp/ep-8"))) << "4 experts";
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

// Also where each process has all experts: the routers see the tokens of all of them.
TEST_F(VerifyLayouts, StrategiesOfExpertsTrainAsOneProcessDoes) {
  const VerifyReport report = verify(experts(true), 4, {.num_steps = 3, .dtype = "float64"});
  EXPECT_TRUE(report.is_within()) << report.to_text();
  EXPECT_GT(report.strategies.size(), names(experts(true), 4).size());
}

TEST_F(VerifyLayouts, TrainAsOneProcessDoes) {
  expect_layouts_within(gpt(true), 2, 3);
  expect_layouts_within(gpt(false), 4, 3);
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

// CADRE_CASES_SEED picks the share of the cases that CTest runs.
class VerifyLayoutsEquality : public VerifyLayouts,
                              public ::testing::WithParamInterface<VerifiedGpt> {};

TEST_P(VerifyLayoutsEquality, OfTwentySteps) {
  const VerifiedGpt& given = GetParam();
  expect_layouts_within(given.has_experts ? experts(given.is_tied) : gpt(given.is_tied),
                        given.world_size, 20);
}

INSTANTIATE_TEST_SUITE_P(Cases, VerifyLayoutsEquality,
                         ::testing::ValuesIn(testing::share_of(verified_gpts())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre::train
