// What the ranks of a pipeline must agree on before they compute: the arguments of its constructor
// and of each step. Every rank takes part in the exchange, also one whose own arguments are
// refused, so that an error is thrown on all ranks, also on those of the replicas, and the groups
// stay usable.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: kInvalidArgument.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/group/process_group.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/pipeline/schedule.h"

namespace cadre::parallel {

// kInvalidArgument: what is wrong with the arguments of a pipeline.
Error pipeline_refusal(const std::string& what);

// By rank, the words of all ranks. Throws `refusal` on this rank if there is one, and on ranks
// without one an error that names the lowest rank which has one. words: of one length on all ranks.
std::vector<std::vector<int64_t>> exchange_words(const ProcessGroup& group,
                                                 std::span<const int64_t> words,
                                                 const std::optional<Error>& refusal,
                                                 std::string_view what);

// The first rank whose word at `index` is not rank 0's.
std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index);

struct PipelineRanks {
  ProcessGroup group;                         // of a pipeline
  std::optional<ProcessGroup> replicas = {};  // that hold the same stages, in other pipelines
};

// What `check` refuses with kInvalidArgument.
std::optional<Error> refusal_of(const std::function<void()>& check);

struct AgreedSubject {
  std::string_view what;
  uint64_t digest = 0;  // of what replicas must have alike
};
// Throws `refusal`, which all ranks of a pipeline have or none of them, on the ranks of all its
// replicas; and an error on all ranks if the digests of replicas differ.
void agree_with_replicas(const PipelineRanks& ranks, const AgreedSubject& subject,
                         const std::optional<Error>& refusal);

// Throws on all ranks unless all have one schedule and fitting options, and each stage is held
// once, where the schedule says. schedule: an error where this rank has refused its arguments.
PipelineRanks agree_on_schedule(const ProcessGroup& group, const std::vector<PipelineStage>& stages,
                                const PipelineOptions& options,
                                const Result<PipelineSchedule>& schedule);

// Gives all replicas the values of their rank 0; throws on all ranks of all replicas unless their
// stages are alike. Without replicas it does nothing.
void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);

}  // namespace cadre::parallel
