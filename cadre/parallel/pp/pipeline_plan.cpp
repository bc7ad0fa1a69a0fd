#include "cadre/parallel/pp/pipeline_plan.h"

#include <map>
#include <optional>
#include <set>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/lowering.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/shard/shardable.h"

namespace cadre::parallel {
namespace {

Result<PipelineSchedule> compute_only_schedule(const PipelineOptions& options, int num_ranks,
                                               int num_own_stages) {
  if (const auto* const schedule = std::get_if<PipelineSchedule>(&options.schedule)) {
    if (options.num_microbatches.value_or(schedule->num_microbatches) !=
        schedule->num_microbatches) {
      return pipeline_refusal(format("num_microbatches is {}, but the schedule is for {}",
                                     *options.num_microbatches, schedule->num_microbatches));
    }
    return *schedule;
  }
  const auto info = schedule_of_name(std::get<std::string>(options.schedule));
  if (!info.ok()) return info.error();
  return make_pipeline_schedule({.kind = info->kind,
                                 .num_ranks = num_ranks,
                                 .num_microbatches = options.num_microbatches.value_or(1),
                                 .stages_per_rank = num_own_stages});
}

std::optional<Error> check_functions(const std::vector<PipelineStage>& stages) {
  for (const PipelineStage& stage : stages) {
    if (stage.has_function()) continue;
    return pipeline_refusal(
        format("the function of stage {} of {} was moved from; pass the stage that it was moved to",
               stage.stage(), stage.num_stages()));
  }
  return std::nullopt;
}

// Returns an error if PipelineOptions::shards is invalid for these stages.
std::optional<Error> check_shards(const std::vector<PipelineStage>& stages,
                                  const PipelineOptions& options) {
  if (!options.shards) return std::nullopt;
  if (options.replicas) {
    return pipeline_refusal(
        "both replicas and shards are given; pass only shards, the mesh of all ranks that have the "
        "same stages: one axis, or two, where the ranks along the first axis have the same shards");
  }
  const std::optional<DeviceMesh>& mesh = options.shards->mesh();
  if (mesh && mesh->axes().size() > 2) {
    return pipeline_refusal(
        format("shards is the mesh {}; pass a mesh of one axis, whose ranks own shards, or of two "
               "axes, where the ranks along the first hold the same shards",
               mesh->to_string()));
  }
  std::map<const void*, int> stage_of;
  for (const PipelineStage& stage : stages) {
    for (const NamedTensor& parameter : stage.parameters()) {
      const auto [known, is_new] =
          stage_of.emplace(parameter.tensor.unsafeGetTensorImpl(), stage.stage());
      if (is_new || known->second == stage.stage()) continue;
      return pipeline_refusal(
          format("\"{}\" of stage {} is also a parameter of stage {}, and sharded stages are "
                 "gathered one by one; take a schedule that has the two stages on different ranks, "
                 "or give each stage a tensor of its own, and call tie_parameters()",
                 parameter.name, stage.stage(), known->second));
    }
  }
  return refusal_of([&] { ShardedStages::check_shardable(stages); });
}

// Returns an error if a wrapper or optimizer has already sharded a module: its values are on other
// ranks, and a pipeline would not gather them.
std::optional<Error> check_values(const std::vector<PipelineStage>& stages) {
  for (const PipelineStage& stage : stages) {
    for (const NamedTensor& parameter : stage.parameters()) {
      const auto reason = shard::reason_without_values(parameter.tensor);
      if (!reason) continue;
      return pipeline_refusal(
          format("the values of \"{}\" of stage {} are not available; {}. Construct the module "
                 "again and load a snapshot",
                 parameter.name, stage.stage(), *reason));
    }
  }
  return std::nullopt;
}

}  // namespace

Result<PipelineScheduleInfo> schedule_of_name(const std::string& name) {
  const PipelineScheduleInfo* const info = find_pipeline_schedule(name);
  if (info != nullptr) return *info;
  std::string names;
  for (const PipelineScheduleInfo& known : pipeline_schedules()) {
    names += format("{}\"{}\"", names.empty() ? "" : ", ", known.name);
  }
  return pipeline_refusal(format("there is no schedule \"{}\"; there are {}", name, names));
}

Result<PipelineSchedule> lowered_schedule(const std::vector<PipelineStage>& stages,
                                          const PipelineOptions& options, int num_ranks) {
  if (stages.empty())
    return pipeline_refusal("this rank holds no stage; every rank needs at least one");
  auto schedule = compute_only_schedule(options, num_ranks, static_cast<int>(stages.size()));
  if (!schedule.ok()) return schedule.error();
  if (schedule->num_ranks() != num_ranks) {
    return pipeline_refusal(format("the schedule is for {} ranks, but the group has {}",
                                   schedule->num_ranks(), num_ranks));
  }
  CADRE_RETURN_IF_ERROR(check_pipeline(*schedule));
  if (auto error = check_functions(stages)) return *error;
  if (auto error = check_values(stages)) return *error;
  if (auto error = check_shards(stages, options)) return *error;
  std::set<int> numbers;
  for (const PipelineStage& stage : stages) {
    if (stage.num_stages() != schedule->num_stages()) {
      return pipeline_refusal(format("stage {} is one of {} stages, but the schedule is for {}",
                                     stage.stage(), stage.num_stages(), schedule->num_stages()));
    }
    if (!numbers.insert(stage.stage()).second) {
      return pipeline_refusal(format("this rank passes stage {} twice", stage.stage()));
    }
  }
  PipelineLowering lowering{.receives = ReceivePlacement::kAsSent};
  if (options.shards) lowering.max_unsharded_stages = options.max_unsharded_stages;
  return lower_pipeline(*schedule, lowering);
}

}  // namespace cadre::parallel
