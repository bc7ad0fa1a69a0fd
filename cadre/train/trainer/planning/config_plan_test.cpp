// Tests that the plan of a configuration equals the plan of its model, and tests the tables that
// compare plans.
#include "cadre/train/trainer/planning/config_plan.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/torch/measured_memory.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/trainer/config/config_fields.h"
#include "cadre/train/trainer/models/image_classifier.h"
#include "cadre/train/trainer/models/language_model.h"
#include "cadre/train/trainer/planning/plan_report.h"
#include "cadre/train/trainer/progress.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {
namespace {

using cadre::testing::CountedMemory;
using ::testing::AllOf;
using ::testing::HasSubstr;

Config config_of_model(const std::string& model, const std::string& data) {
  Config config;
  config.model = {.kind = model, .layers = 2, .heads = 2, .width = 16, .context = 16};
  config.data.kind = data;
  return config;
}

std::shared_ptr<Model> real_model(const Config& config) {
  if (config.data.kind == "text") return make_language_model(config.model, kVocabularySize, 1);
  return make_image_classifier(config.model, 1);
}

TEST(ConfigPlan, HasTheSizesOfTheModel) {
  const std::vector<std::pair<const char*, const char*>> kinds = {
      {"gpt", "text"}, {"mlp", "text"}, {"cnn", "synthetic"}, {"mlp", "synthetic"}};
  for (const auto& [kind, data] : kinds) {
    SCOPED_TRACE(std::string(kind) + " on " + data);
    const Config config = config_of_model(kind, data);
    const ModelSizes sizes = sizes_of_model(config);
    const std::shared_ptr<Model> model = real_model(config);
    const auto parameters = model->named_parameters();
    ASSERT_EQ(sizes.parameters.size(), parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(sizes.parameters[i].name, parameters[i].key());
      EXPECT_EQ(at::IntArrayRef(sizes.parameters[i].sizes), parameters[i].value().sizes());
      const size_t unit = sizes.parameters[i].unit;
      EXPECT_TRUE(unit == 0 || parameters[i].key().starts_with(sizes.units[unit].name + "."));
    }
    EXPECT_EQ(sizes.units.size(), kind == std::string("cnn") ? 2U : 3U);
  }
}

// The model has 24 layers of 12 * 18,688^2 elements, which would take 402 GB. Planning must not
// allocate them.
TEST(ConfigPlan, NeedsNoMemoryForTheModel) {
  Config config = config_of_model("gpt", "text");
  config.model = {.layers = 24, .heads = 32, .width = 18'688, .context = 2048};
  CountedMemory& memory = CountedMemory::install();
  CountedMemory::set_rank(0);
  memory.reset_peak(0);
  const int64_t before = memory.bytes(0);
  const int64_t resident_before = resident_memory_bytes();
  const ModelSizes sizes = sizes_of_model(config);
  const auto plans = plans_of_strategies(config, sizes, {.count = 64, .per_host = 64});
  EXPECT_GT(plans[0].plan.held.parameters, int64_t{400'000'000'000});
  EXPECT_LT(memory.peak_bytes(0) - before, 1 << 20);
  EXPECT_LT(resident_memory_bytes() - resident_before, 64 << 20);
}

const NamedPlan& plan_named(const std::vector<NamedPlan>& plans, const std::string& name) {
  const auto found = std::ranges::find(plans, name, &NamedPlan::name);
  if (found == plans.end()) throw Error(ErrorCode::kInternal, "no plan is named " + name);
  return *found;
}

TEST(ConfigPlan, OfEachStrategyFollowsTheConfiguration) {
  Config config = config_of_model("gpt", "text");
  config.parallel.strategy = "fsdp";
  config.parallel.reshard = "after_backward";
  config.parallel.parameter_dtype = "bfloat16";
  config.optimizer = default_optimizer("sgd");
  config.run.accumulate = 3;
  const ModelSizes sizes = sizes_of_model(config);
  const auto plans = plans_of_strategies(config, sizes, {.count = 4, .per_host = 4});
  EXPECT_EQ(plans.size(), 10U);
  EXPECT_EQ(std::ranges::count(plans, true, &NamedPlan::is_chosen), 1);
  const NamedPlan& chosen = plan_named(plans, "fsdp, after_backward");
  EXPECT_TRUE(chosen.is_chosen);
  EXPECT_EQ(chosen.plan.options.parameter_dtype, DType::kBfloat16);
  EXPECT_EQ(chosen.plan.options.reduce_dtype, DType::kFloat32);
  EXPECT_EQ(chosen.plan.options.optimizer.states, 1);
  EXPECT_EQ(chosen.plan.options.accumulate, 3);
  EXPECT_EQ(chosen.plan.held.total(),
            plan_of_config(config, sizes, {.count = 4, .per_host = 4}).plan.held.total());
  EXPECT_EQ(plan_named(plans, "single").plan.options.num_ranks, 1);
  EXPECT_FALSE(plan_named(plans, "ddp").plan.options.parameter_dtype.has_value());
  EXPECT_EQ(plan_named(plans, "hsdp, after_forward").plan.options.num_replicas, 2);
  // hsdp is missing, because 2 replicas need an even number of processes.
  EXPECT_EQ(plans_of_strategies(config, sizes, {.count = 3, .per_host = 3}).size(), 7U);
  config.parallel.strategy = "single";
  EXPECT_THROW(plan_of_config(config, sizes, {.count = 2, .per_host = 2}), Error);
}

// Processes of one host map their shards on the CPU, so that they gather nothing.
TEST(ConfigPlan, OnDevicesSharesNothing) {
  Config config = config_of_model("gpt", "text");
  config.parallel.strategy = "fsdp";
  const ModelSizes model = sizes_of_model(config);
  const MemoryPlan on_cpu = plan_of_config(config, model, {.count = 2, .per_host = 2}).plan;
  EXPECT_TRUE(on_cpu.is_mapped);
  EXPECT_EQ(on_cpu.held.full_units, 0);
  const Processes on_devices = {.count = 2, .per_host = 2, .on_devices = true};
  const MemoryPlan plan = plan_of_config(config, model, on_devices).plan;
  EXPECT_FALSE(plan.is_mapped);
  EXPECT_EQ(plan.shared_bytes, 0);
  EXPECT_GT(plan.held.full_units, 0);
  for (const NamedPlan& named : plans_of_strategies(config, model, on_devices)) {
    EXPECT_TRUE(named.plan.options.is_on_device) << named.name;
    EXPECT_EQ(named.plan.shared_bytes, 0) << named.name;
  }
  EXPECT_THAT(comparison_table(config, model, plans_of_strategies(config, model, on_devices)),
              HasSubstr("The memory of a process's device at its peak"));
}

TEST(ConfigPlan, OfExpertsDividesThem) {
  Config config = config_of_model("gpt", "text");
  config.model.experts = 8;
  config.run.global_batch_size = 8;
  config.parallel.expert = 4;
  const ModelSizes sizes = sizes_of_model(config);
  const auto plans = plans_of_strategies(config, sizes, {.count = 8, .per_host = 8});
  const NamedPlan& chosen = plan_named(plans, "ddp, expert 4");
  EXPECT_EQ(chosen.plan.options.num_ranks, 2);
  EXPECT_GT(chosen.division.expert, 0);
  // An expert has two matrices of 16 x 64 floats in each of the two blocks.
  constexpr int64_t kExpertBytes = 2 * 2 * 16 * 64 * 4;
  const HeldBytes& all = plan_named(plans, "single").plan.held;
  EXPECT_EQ(chosen.plan.held.parameters, all.parameters - 6 * kExpertBytes);
  // The sizes of gradients are rounded up to whole pages, so they cannot be compared exactly.
  EXPECT_LT(chosen.plan.held.gradients, all.gradients);
  EXPECT_EQ(chosen.plan.held.optimizer_state, all.optimizer_state - 12 * kExpertBytes);
  EXPECT_THAT(start_table(chosen), HasSubstr("expert"));
}

TEST(ConfigPlan, OfADividedModelHasTheStrategiesThatTheLayoutCanHave) {
  Config config = config_of_model("gpt", "text");
  config.run.global_batch_size = 8;
  const ModelSizes sizes = sizes_of_model(config);
  config.parallel.tensor = 2;
  auto plans = plans_of_strategies(config, sizes, {.count = 4, .per_host = 4});
  const NamedPlan& chosen = plan_named(plans, "ddp, tensor 2");
  EXPECT_TRUE(chosen.is_chosen);
  EXPECT_EQ(chosen.num_processes, 4);
  EXPECT_EQ(chosen.plan.options.num_ranks, 2);
  EXPECT_GT(chosen.division.tensor, 0);
  const NamedPlan& single = plan_named(plans, "single");
  EXPECT_EQ(single.division.total(), 0);
  EXPECT_LT(chosen.plan.held.parameters, single.plan.held.parameters * 6 / 10);
  (void)plan_named(plans, "zero2, tensor 2");
  (void)plan_named(plans, "fsdp, tensor 2, after_backward");
  const std::string text = comparison_table(config, sizes, plans);
  EXPECT_THAT(text, AllOf(HasSubstr("\n* ddp, tensor 2 "), HasSubstr("in the model  received"),
                          HasSubstr("; 4 processes"), HasSubstr("the process that holds most")));
  const nlohmann::json json = nlohmann::json::parse(plans_json(config, sizes, plans));
  EXPECT_EQ(json["strategies"][1]["division_bytes"]["tensor"], chosen.division.tensor);
  config.parallel = {.pipeline = 2};
  plans = plans_of_strategies(config, sizes, {.count = 4, .per_host = 4});
  std::vector<std::string> names;
  for (const NamedPlan& named : plans) names.push_back(named.name);
  EXPECT_EQ(names, (std::vector<std::string>{"single", "ddp, pipeline 2", "fsdp, pipeline 2",
                                             "hsdp, pipeline 2"}));
  EXPECT_GT(plan_named(plans, "ddp, pipeline 2").division.pipeline, 0);
  EXPECT_THROW(plan_of_config(config, sizes, {.count = 3, .per_host = 3}), Error);
}

// Every strategy must have a plan with every division, on one replica of the model and on two.
TEST(ConfigPlan, EveryStrategyOfEveryDivisionHasOne) {
  const Config model = config_of_model("gpt", "text");
  for (const ParallelConfig& division :
       {ParallelConfig{.tensor = 2}, {.pipeline = 2}, {.context = 2}, {.expert = 2}}) {
    for (const char* strategy : {"single", "ddp", "zero1", "zero2", "fsdp", "hsdp"}) {
      for (const int count : {2, 4}) {
        Config config = model;
        config.model.experts = division.expert > 1 ? 4 : 0;
        config.run.global_batch_size = 8;
        config.parallel = division;
        config.parallel.strategy = strategy;
        config.parallel.replicas = 1;
        if (find_layout_conflict(config)) continue;
        if (strategy == std::string("single") && count > 2) continue;
        SCOPED_TRACE(layout_name(config.parallel) + " on " + std::to_string(count));
        const ModelSizes sizes = sizes_of_model(config);
        const Processes processes = {.count = count, .per_host = count};
        const NamedPlan chosen = plan_of_config(config, sizes, processes);
        EXPECT_GT(chosen.plan.held.parameters, 0);
        const auto plans = plans_of_strategies(config, sizes, processes);
        const auto same = std::ranges::find(plans, true, &NamedPlan::is_chosen);
        ASSERT_NE(same, plans.end());
        EXPECT_EQ(same->plan.held.total(), chosen.plan.held.total());
      }
    }
  }
}

}  // namespace
}  // namespace cadre::train
