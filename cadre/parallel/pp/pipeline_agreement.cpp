#include "cadre/parallel/pp/pipeline_agreement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/pipeline_plan.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::parallel {
namespace {

uint64_t fingerprint_of(const PipelineSchedule& schedule) {
  Fnv1a hash;
  hash.add(static_cast<uint64_t>(schedule.num_microbatches));
  for (const int rank : schedule.rank_of_stage) hash.add(static_cast<uint64_t>(rank));
  for (const auto& actions : schedule.ranks) {
    hash.add(actions.size());
    for (const PipelineAction& action : actions) hash.add(to_text(action));
  }
  return hash.value();
}

AgreedField field_of(const PipelineSchedule& schedule) {
  return {"the schedule",
          format("one of {} stages and {} microbatches with the digest {:x}", schedule.num_stages(),
                 schedule.num_microbatches, fingerprint_of(schedule))};
}

// Returns the ranks that have the same stages in other pipelines, each with its own batch.
std::optional<ProcessGroup> replicas_of(const PipelineOptions& options) {
  if (options.shards) return options.shards->group();
  return options.replicas ? std::optional(options.replicas->group()) : std::nullopt;
}

// Returns a field that must be equal on the ranks of a pipeline and of its replicas: together with
// the schedule it decides when stages are gathered, and all replicas must gather them at the same
// time.
AgreedField field_of_memory(const PipelineOptions& options) {
  return {"max_unsharded_stages", format("{}", options.max_unsharded_stages)};
}

std::vector<AgreedField> fields_of(const PipelineOptions& options) {
  const auto count_of = [](bool is_given, int count) {
    return is_given ? format("{} ranks", count) : std::string("not given");
  };
  return {
      {"dynamic_shapes", options.dynamic_shapes ? "on" : "off"},
      {"replicas",
       count_of(options.replicas.has_value(), options.replicas ? options.replicas->size() : 0)},
      {"shards", count_of(options.shards.has_value(), options.shards ? options.shards->size() : 0)},
      field_of_memory(options)};
}

}  // namespace

Error pipeline_refusal(const std::string& what) {
  return {ErrorCode::kInvalidArgument, "cadre::Pipeline: " + what};
}

std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index) {
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (words[rank][index] != words[0][index]) return static_cast<int>(rank);
  }
  return std::nullopt;
}

namespace {

// Throws on all ranks of the pipeline unless exactly one rank passes each stage, the one that the
// schedule says.
void check_stages_match(const ProcessGroup& group, const PipelineSchedule& schedule,
                        const std::vector<PipelineStage>& stages) {
  const size_t num_stages = schedule.rank_of_stage.size();
  const auto all = gather_words(group, kPipelineCall, num_stages, [&] {
    std::vector<int64_t> held(num_stages, 0);
    for (const PipelineStage& stage : stages) held[static_cast<size_t>(stage.stage())] = 1;
    return held;
  });
  for (size_t stage = 0; stage < num_stages; ++stage) {
    const int expected = schedule.rank_of_stage[stage];
    std::string holders;
    for (int rank = 0; rank < group.world_size(); ++rank) {
      if (all[rank][stage] != 0) holders += format("{}{}", holders.empty() ? "" : " and ", rank);
    }
    if (holders == format("{}", expected)) continue;
    throw pipeline_refusal(
        format("stage {} of {} is held by {}; the schedule places it on rank {} alone", stage,
               num_stages, holders.empty() ? std::string("no rank") : "rank " + holders, expected));
  }
}

void check_trainable(const ProcessGroup& group, const std::vector<PipelineStage>& stages) {
  wrap::refuse_inference_mode(kPipelineCall);
  for (const PipelineStage& stage : stages) {
    wrap::refuse_inference_tensors(format("{}, stage {}", kPipelineCall, stage.stage()),
                                   stage.parameters());
    std::vector<NamedTensor> tensors = stage.parameters();
    for (const at::Tensor& buffer : stage.buffers()) tensors.push_back({"a buffer", buffer});
    wrap::check_devices(format("{}, stage {}", kPipelineCall, stage.stage()), tensors,
                        group.device());
  }
}

// Returns each tensor once. If two stages share a tensor, it is reduced once, so the same stages
// must share it in all replicas.
std::vector<NamedTensor> named_parameters_of(const std::vector<PipelineStage>& stages) {
  std::vector<NamedTensor> parameters;
  std::map<const void*, std::string> first_names;
  for (const PipelineStage& stage : stages) {
    for (const auto& [own_name, tensor] : stage.parameters()) {
      const std::string name = format("{}:{}", stage.stage(), own_name);
      const auto [first, is_first] = first_names.emplace(tensor.unsafeGetTensorImpl(), name);
      if (is_first) {
        parameters.push_back({name, tensor});
      } else {
        parameters.push_back({format("{}, the same as {}", name, first->second), tensor});
      }
    }
  }
  return parameters;
}

std::vector<NamedTensor> named_buffers_of(const std::vector<PipelineStage>& stages) {
  std::vector<NamedTensor> buffers;
  for (const PipelineStage& stage : stages) {
    for (const at::Tensor& buffer : stage.buffers()) {
      buffers.push_back({format("{}, {}", stage.stage(), buffers.size()), buffer});
    }
  }
  return buffers;
}

}  // namespace

std::optional<Error> refusal_of(const std::function<void()>& check) {
  try {
    check();
  } catch (...) {
    Error error = caught_error();
    switch (error.code()) {
      case ErrorCode::kTimeout:
      case ErrorCode::kPeerLost:
      case ErrorCode::kAborted:
        throw;
      default:
        return error;
    }
  }
  return std::nullopt;
}

void agree_with_replicas(const PipelineRanks& ranks, const std::vector<AgreedField>& fields,
                         const std::optional<Error>& refusal) {
  if (!ranks.replicas) {
    if (refusal) throw *refusal;
    return;
  }
  check_equal_on_all_ranks(
      *ranks.replicas, kPipelineCall,
      [&] {
        if (refusal) throw *refusal;
        return fields;
      },
      "pass the same options in all replicas");
}

AgreedSchedule agree_on_schedule(const ProcessGroup& group,
                                 const std::vector<PipelineStage>& stages,
                                 const PipelineOptions& options) {
  std::optional<PipelineSchedule> schedule;
  const std::optional<Error> refusal = refusal_of([&] {
    check_equal_on_all_ranks(
        group, kPipelineCall,
        [&] {
          check_trainable(group, stages);
          schedule = lowered_schedule(stages, options, group.world_size()).value_or_throw();
          std::vector<AgreedField> fields = fields_of(options);
          fields.insert(fields.begin(), field_of(*schedule));
          return fields;
        },
        "pass the same options on all ranks");
    check_stages_match(group, *schedule, stages);
  });
  // Even a rank with invalid options creates the group, because the other replicas wait for it.
  PipelineRanks ranks{.group = group, .replicas = replicas_of(options)};
  std::vector<AgreedField> fields;
  if (schedule) fields = {field_of(*schedule), field_of_memory(options)};
  agree_with_replicas(ranks, fields, refusal);
  return {.ranks = std::move(ranks), .schedule = std::move(*schedule)};
}

void check_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks) {
  if (!ranks.replicas) return;
  const std::vector<NamedTensor> parameters = named_parameters_of(stages);
  const std::vector<NamedTensor> buffers = named_buffers_of(stages);
  const std::optional<Error> refusal = refusal_of([&] {
    wrap::check_replicas_match(kPipelineCall, {parameters, buffers}, *ranks.replicas);
  });
  check_on_all_ranks(ranks.group, kPipelineCall, [&] {
    if (refusal) throw *refusal;
  });
}

void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks) {
  if (!ranks.replicas) return;
  wrap::broadcast_tensors(named_parameters_of(stages), 0, *ranks.replicas);
  wrap::broadcast_tensors(named_buffers_of(stages), 0, *ranks.replicas);
}

}  // namespace cadre::parallel
