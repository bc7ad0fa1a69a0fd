#include "cadre/parallel/pp/pipeline_agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/wrap/replica_check.h"

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

uint64_t fingerprint_of(const PipelineOptions& options) {
  int num_replicas = options.replicas ? options.replicas->world_size() : 0;
  if (options.shards) num_replicas = options.shards->size();
  Fnv1a hash;
  hash.add(static_cast<uint64_t>(options.dynamic_shapes ? 1 : 0));
  hash.add(static_cast<uint64_t>(options.shards ? 1 : 0));
  hash.add(static_cast<uint64_t>(num_replicas));
  return hash.value();
}

// The ranks that hold the same stages, each with a batch of its own.
std::optional<ProcessGroup> replicas_of(const PipelineOptions& options) {
  if (!options.shards) return options.replicas;
  std::vector<std::string> names;
  for (const MeshAxis& axis : options.shards->axes()) names.push_back(axis.name);
  return options.shards->joint_group(names);
}

}  // namespace

Error pipeline_refusal(const std::string& what) {
  return {ErrorCode::kInvalidArgument, "cadre::Pipeline: " + what};
}

std::vector<std::vector<int64_t>> exchange_words(const ProcessGroup& group,
                                                 std::span<const int64_t> words,
                                                 const std::optional<Error>& refusal,
                                                 std::string_view what) {
  const auto count = static_cast<int64_t>(words.size()) + 1;
  const at::Tensor own = at::empty({count}, at::kLong);
  auto* const own_words = own.mutable_data_ptr<int64_t>();
  own_words[0] = refusal ? 1 : 0;
  std::ranges::copy(words, own_words + 1);
  const at::Tensor all = at::empty({group.world_size() * count}, at::kLong);
  group.all_gather_into_tensor(all, own);
  if (refusal) throw *refusal;
  std::vector<std::vector<int64_t>> result;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const int64_t* const begin = all.const_data_ptr<int64_t>() + rank * count;
    if (*begin != 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("cadre::Pipeline: rank {} of the group \"{}\" refused its {}; its own error "
                 "says why",
                 rank, group.name(), what))
          .with_culprit(rank);
    }
    result.emplace_back(begin + 1, begin + count);
  }
  return result;
}

std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index) {
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (words[rank][index] != words[0][index]) return static_cast<int>(rank);
  }
  return std::nullopt;
}

namespace {

// Throws on all ranks of the pipeline unless all have one schedule, and replicas or none.
void check_schedules_match(const ProcessGroup& group, const PipelineOptions& options,
                           const Result<PipelineSchedule>& schedule) {
  std::vector<int64_t> words(4, 0);
  if (schedule.ok()) {
    words = {static_cast<int64_t>(fingerprint_of(*schedule)), schedule->num_stages(),
             schedule->num_microbatches, static_cast<int64_t>(fingerprint_of(options))};
  }
  const auto all =
      exchange_words(group, words, schedule.ok() ? std::nullopt : std::optional(schedule.error()),
                     "stages or options");
  if (const auto other = first_unlike(all, 0)) {
    throw pipeline_refusal(
        format("rank 0 has a schedule of {} stages and {} microbatches, rank {} another "
               "one, of {} stages and {} microbatches; pass the same options on all ranks",
               all[0][1], all[0][2], *other, all[*other][1], all[*other][2]));
  }
  if (const auto other = first_unlike(all, 3)) {
    throw pipeline_refusal(
        format("ranks 0 and {} differ in dynamic_shapes, or in whether there are replicas or "
               "shards and on how many ranks; pass the same options on all ranks",
               *other));
  }
}

// Throws on all ranks of the pipeline unless each stage is held once, and where the schedule says.
void check_stages_match(const ProcessGroup& group, const PipelineSchedule& schedule,
                        const std::vector<PipelineStage>& stages) {
  std::vector<int64_t> held(schedule.rank_of_stage.size(), 0);
  for (const PipelineStage& stage : stages) held[static_cast<size_t>(stage.stage())] = 1;
  const auto all = exchange_words(group, held, std::nullopt, "stages");
  for (size_t stage = 0; stage < held.size(); ++stage) {
    const int expected = schedule.rank_of_stage[stage];
    std::string holders;
    for (int rank = 0; rank < group.world_size(); ++rank) {
      if (all[rank][stage] != 0) holders += format("{}{}", holders.empty() ? "" : " and ", rank);
    }
    if (holders == format("{}", expected)) continue;
    throw pipeline_refusal(format(
        "stage {} of {} is held by {}; the schedule places it on rank {} alone", stage, held.size(),
        holders.empty() ? std::string("no rank") : "rank " + holders, expected));
  }
}

}  // namespace

std::optional<Error> refusal_of(const std::function<void()>& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    return error;
  }
  return std::nullopt;
}

void agree_with_replicas(const PipelineRanks& ranks, const AgreedSubject& subject,
                         const std::optional<Error>& refusal) {
  if (!ranks.replicas) {
    if (refusal) throw *refusal;
    return;
  }
  const std::vector<int64_t> digest{static_cast<int64_t>(subject.digest)};
  const auto all = exchange_words(*ranks.replicas, digest, refusal, subject.what);
  if (const auto other = first_unlike(all, 0)) {
    throw pipeline_refusal(format("replicas 0 and {} have other {}; pass the same in all replicas",
                                  *other, subject.what));
  }
}

PipelineRanks agree_on_schedule(const ProcessGroup& group, const std::vector<PipelineStage>& stages,
                                const PipelineOptions& options,
                                const Result<PipelineSchedule>& schedule) {
  const std::optional<Error> refusal = refusal_of([&] {
    check_schedules_match(group, options, schedule);
    check_stages_match(group, *schedule, stages);
  });
  // Also a rank that refuses its options makes the group, because the other replicas wait for it.
  PipelineRanks ranks{.group = group, .replicas = replicas_of(options)};
  agree_with_replicas(
      ranks, {.what = "stages or options", .digest = schedule.ok() ? fingerprint_of(*schedule) : 0},
      refusal);
  if (ranks.replicas) group.communicator().fail_together(ranks.replicas->communicator());
  return ranks;
}

void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks) {
  if (!ranks.replicas) return;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  // A tensor that two stages have is reduced once, so replicas have it in the same stages.
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
    for (const at::Tensor& buffer : stage.buffers()) {
      buffers.push_back({format("{}, {}", stage.stage(), buffers.size()), buffer});
    }
  }
  const std::optional<Error> refusal = refusal_of([&] {
    wrap::check_replicas_match("cadre::Pipeline", {parameters, buffers}, *ranks.replicas);
  });
  static_cast<void>(exchange_words(ranks.group, {}, refusal, "replicas"));
  wrap::broadcast_tensors(parameters, 0, *ranks.replicas);
  wrap::broadcast_tensors(buffers, 0, *ranks.replicas);
}

}  // namespace cadre::parallel
