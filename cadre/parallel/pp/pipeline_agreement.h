// What the ranks of a pipeline must agree on before they compute: the arguments of its constructor
// and of each step. Every rank takes part in the exchange, also one whose own arguments are
// refused, so that an error is thrown on all ranks, also on those of the replicas, and the groups
// stay usable. Refusals go through tensor/group/agreement.h.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: what a rank refuses, the
// same on all ranks; kInvalidArgument for what differs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::parallel {

// The subject of every agreement of a pipeline.
inline constexpr const char* kPipelineCall = "cadre::Pipeline";

// kInvalidArgument: what is wrong with the arguments of a pipeline.
Error pipeline_refusal(const std::string& what);

// By rank, the words of all ranks, in one all_gather. What `make_words` throws on any rank is
// thrown on all. It returns `num_words`, which is the same on all ranks, and calls no collective.
std::vector<std::vector<int64_t>> exchange_words(
    const ProcessGroup& group, size_t num_words,
    const std::function<std::vector<int64_t>()>& make_words);

// The first rank whose word at `index` is not rank 0's.
std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index);

struct PipelineRanks {
  ProcessGroup group;                         // ranks of a pipeline
  std::optional<ProcessGroup> replicas = {};  // ranks with the same stages in other pipelines
};

// What `check`, which may be collective, refuses; that of a failed group leaves it.
std::optional<Error> refusal_of(const std::function<void()>& check);

// Throws `refusal`, which all ranks of a pipeline have or none of them, on the ranks of all its
// replicas; and an error on all ranks if these fields of replicas differ.
void agree_with_replicas(const PipelineRanks& ranks, const std::vector<AgreedField>& fields,
                         const std::optional<Error>& refusal);

// Throws on all ranks unless all have one schedule and fitting options, and each stage is held
// once, where the schedule says.
struct AgreedSchedule {
  PipelineRanks ranks;
  PipelineSchedule schedule;
};
AgreedSchedule agree_on_schedule(const ProcessGroup& group,
                                 const std::vector<PipelineStage>& stages,
                                 const PipelineOptions& options);

// Throws on all ranks of all replicas unless their stages are alike. Without replicas it does
// nothing, and neither does the next one.
void check_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);
// Gives all replicas the values of their rank 0.
void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);

}  // namespace cadre::parallel
