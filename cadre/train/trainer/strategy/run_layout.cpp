#include "cadre/train/trainer/strategy/run_layout.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

// The number of microbatches for each process, if parallel.microbatches is 0. More microbatches
// would shorten the bubble only slightly.
constexpr int64_t kMicrobatchesOfARank = 4;

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument, sentence);
}

// Returns the degrees above 1 as a text, for example "tensor 2 * pipeline 2".
std::string product_text(const ParallelConfig& parallel) {
  std::string text;
  for (const auto& [name, size] : {std::pair{"tensor", parallel.tensor},
                                   {"pipeline", parallel.pipeline},
                                   {"context", parallel.context},
                                   {"expert", parallel.expert}}) {
    if (size > 1) text += cadre::format("{}{} {}", text.empty() ? "" : " * ", name, size);
  }
  return text;
}

Result<PipelineSchedule> schedule_of(const Config& config, const Degrees& degrees,
                                     int64_t num_microbatches) {
  return make_pipeline_schedule(
      {.kind = find_pipeline_schedule(config.parallel.schedule)->kind,
       .num_ranks = degrees.pipeline,
       .num_microbatches = static_cast<int>(num_microbatches),
       .stages_per_rank = static_cast<int>(config.parallel.virtual_stages)});
}

Result<PipelineSchedule> chosen_schedule(const Config& config, const Degrees& degrees) {
  const int64_t rows = config.run.global_batch_size / degrees.data;
  if (const int64_t given = config.parallel.microbatches; given > 0) {
    auto schedule = schedule_of(config, degrees, given);
    if (schedule.ok()) return schedule;
    return schedule.error().with_context(cadre::format(
        "parallel.microbatches is {}, which parallel.schedule does not allow", given));
  }
  std::optional<Error> of_most;
  const int64_t most = std::min<int64_t>(rows, kMicrobatchesOfARank * degrees.pipeline);
  for (int64_t count = most; count > 0; --count) {
    if (rows % count != 0) continue;
    auto schedule = schedule_of(config, degrees, count);
    if (schedule.ok()) return schedule;
    if (!of_most) of_most = schedule.error();
  }
  return of_most->with_context(cadre::format(
      "run.global_batch_size is {}, which gives each pipeline {} samples; no "
      "divisor of that number is a number of microbatches that parallel.schedule allows",
      config.run.global_batch_size, rows));
}

void check_stages(const ParallelConfig& parallel) {
  const PipelineScheduleInfo& info = *find_pipeline_schedule(parallel.schedule);
  const int64_t given = parallel.virtual_stages;
  if (given >= info.min_stages_per_rank && given <= info.max_stages_per_rank) return;
  const int allowed = info.usual_stages_per_rank;
  refuse(
      cadre::format("parallel.virtual_stages is {}, but parallel.schedule is {}, which has exactly "
                    "{} {} on each process: choose {}, or another schedule",
                    given, info.name, allowed, allowed == 1 ? "stage" : "stages", allowed));
}

void check_pipeline(const Config& config, const Degrees& degrees) {
  const int64_t batch = config.run.global_batch_size;
  if (batch % degrees.data != 0) {
    refuse(
        cadre::format("run.global_batch_size is {}, which is not a multiple of the number of "
                      "pipelines, {}, that these processes form",
                      batch, degrees.data));
  }
  const int64_t rows = batch / degrees.data;
  const int64_t count = config.parallel.microbatches;
  if (count > 0 && rows % count != 0) {
    refuse(
        cadre::format("parallel.microbatches is {}, which does not divide the {} samples that "
                      "each of the {} pipelines is given of run.global_batch_size",
                      count, rows, degrees.data));
  }
  check_stages(config.parallel);
  const auto schedule = chosen_schedule(config, degrees);
  if (!schedule.ok()) throw schedule.error();
}

void check_data_degree(const ParallelConfig& parallel, const Degrees& degrees, int world_size) {
  const bool divides = parallel.divides_model();
  if (data_strategy(parallel) == DataStrategy::kSingle && degrees.data > 1) {
    refuse(divides ? cadre::format("parallel.strategy is single, but {} on {} processes makes {} "
                                   "groups with different samples: choose ddp, zero1, zero2, fsdp "
                                   "or hsdp, or start {} processes",
                                   product_text(parallel), world_size, degrees.data,
                                   world_size / degrees.data)
                   : cadre::format("parallel.strategy is single, which takes one process, but "
                                   "there are {} processes: choose ddp, zero1, zero2, fsdp or "
                                   "hsdp, or start one process",
                                   world_size));
  }
  if (data_strategy(parallel) == DataStrategy::kHsdp &&
      degrees.data % num_replicas(parallel) != 0) {
    refuse(divides ? cadre::format(
                         "parallel.replicas is {}, which does not divide {}, the number of "
                         "groups that each have the whole model ({} on {} processes)",
                         num_replicas(parallel), degrees.data, product_text(parallel), world_size)
                   : cadre::format("parallel.replicas is {}, which does not divide the {} "
                                   "processes",
                                   num_replicas(parallel), world_size));
  }
}

}  // namespace

Degrees degrees_of(const ParallelConfig& parallel, int world_size) {
  const int64_t product = parallel.tensor * parallel.pipeline * parallel.context * parallel.expert;
  if (world_size % product != 0) {
    refuse(cadre::format(
        "{} takes {} processes, and the {} processes of this job are not a multiple of that: start "
        "a multiple of {} processes, or change parallel.tensor, pipeline, context or expert",
        product_text(parallel), product, world_size, product));
  }
  return {.pipeline = static_cast<int>(parallel.pipeline),
          .data = static_cast<int>(world_size / product),
          .expert = static_cast<int>(parallel.expert),
          .context = static_cast<int>(parallel.context),
          .tensor = static_cast<int>(parallel.tensor)};
}

int num_replicas(const ParallelConfig& parallel) {
  constexpr int kOnOneHost = 2;
  return parallel.replicas == 0 ? kOnOneHost : static_cast<int>(parallel.replicas);
}

void place_replicas(ParallelConfig& parallel, std::span<const int> host_of_rank) {
  const auto world_size = static_cast<int>(host_of_rank.size());
  if (parallel.replicas != 0 || data_strategy(parallel) != DataStrategy::kHsdp) return;
  const auto on_first_host = static_cast<int>(std::ranges::count(host_of_rank, host_of_rank[0]));
  if (world_size % on_first_host != 0) return;
  for (int rank = 0; rank < world_size; ++rank) {
    if (host_of_rank[static_cast<size_t>(rank)] != rank / on_first_host) return;
  }
  const Degrees degrees = degrees_of(parallel, world_size);
  const int inside_of_shard = degrees.expert * degrees.context * degrees.tensor;
  const int num_shards = std::max(1, std::min(degrees.data, on_first_host / inside_of_shard));
  if (degrees.data > num_shards) parallel.replicas = degrees.data / num_shards;
}

std::vector<std::string> data_axis_names(const ParallelConfig& parallel) {
  const DataStrategy strategy = data_strategy(parallel);
  if (strategy == DataStrategy::kFsdp) return {"dp_shard"};
  if (strategy == DataStrategy::kHsdp) return {"dp_replicate", "dp_shard"};
  return {"dp"};
}

Reshard reshard_of(const ParallelConfig& parallel) {
  return parse_reshard(parallel.reshard).value();
}

std::vector<MeshAxis> data_axes(const ParallelConfig& parallel, const Degrees& degrees) {
  const std::vector<std::string> names = data_axis_names(parallel);
  if (names.size() == 1) return {{names[0], degrees.data}};
  const int replicas = num_replicas(parallel);
  return {{names[0], replicas}, {names[1], degrees.data / replicas}};
}

std::string layout_name(const ParallelConfig& parallel) {
  std::string name = parallel.strategy;
  if (parallel.pipeline > 1) name += cadre::format(", pipeline {}", parallel.pipeline);
  if (parallel.expert > 1) name += cadre::format(", expert {}", parallel.expert);
  if (parallel.context > 1) name += cadre::format(", context {}", parallel.context);
  if (parallel.tensor > 1) name += cadre::format(", tensor {}", parallel.tensor);
  return name;
}

void check_layout(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  if (const auto conflict = find_layout_conflict(config)) {
    refuse(cadre::format("{} {}", conflict->field, conflict->reason));
  }
  const Degrees degrees = degrees_of(parallel, world_size);
  check_data_degree(parallel, degrees, world_size);
  if (parallel.pipeline > 1) check_pipeline(config, degrees);
  if (has_units(data_strategy(parallel)) && parallel.offload != "none" &&
      !std::filesystem::is_directory(parallel.offload)) {
    refuse(cadre::format("parallel.offload: there is no folder {}; make it, or choose none",
                         parallel.offload));
  }
}

PipelineSchedule pipeline_schedule(const Config& config, const Degrees& degrees) {
  return chosen_schedule(config, degrees).value_or_throw();
}

RunLayout lay_out(const Config& config, const ProcessGroup& world, c10::Device device) {
  const ParallelConfig& parallel = config.parallel;
  const Degrees degrees = degrees_of(parallel, world.world_size());
  // Routers need the token counts of all processes, even if each process has all experts.
  const bool has_experts = config.model.experts > 0 && world.world_size() > 1;
  if (!parallel.divides_model() && !has_experts) {
    const bool has_replicas = data_strategy(parallel) == DataStrategy::kHsdp;
    return {.world = world,
            .degrees = degrees,
            .mesh = {},
            .replicas = has_replicas
                            ? std::optional(DeviceMesh(world, data_axes(parallel, degrees)))
                            : std::nullopt,
            .data = {.rank = world.rank(), .size = world.world_size(), .group = world},
            .device = device};
  }
  std::vector<MeshAxis> axes = data_axes(parallel, degrees);
  axes.insert(axes.begin(), {"pp", degrees.pipeline});
  if (has_experts) axes.push_back({"ep", degrees.expert});
  axes.push_back({"cp", degrees.context});
  axes.push_back({"tp", degrees.tensor});
  const DeviceMesh mesh(world, std::move(axes));
  return {
      .world = world, .degrees = degrees, .mesh = mesh, .data = data_ranks(mesh), .device = device};
}

std::vector<std::string> token_axes(const ParallelConfig& parallel) {
  std::vector<std::string> names = data_axis_names(parallel);
  names.emplace_back("ep");
  if (parallel.context > 1) names.emplace_back("cp");
  return names;
}

}  // namespace cadre::train
