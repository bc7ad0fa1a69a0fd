// Compares between the ranks of a pipeline, before they compute, the arguments of its constructor
// and of each step. Every rank takes part in the exchange, also one whose own arguments are
// invalid, so that an error is thrown on all ranks, also on those of the replicas, and the groups
// stay usable. Refusals go through tensor/group/agreement.h.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: the error of a rank whose
// arguments are invalid, on all ranks; kInvalidArgument for arguments that differ.
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

// Returns the kInvalidArgument error for wrong arguments of a pipeline. `what` describes the
// mistake.
Error pipeline_refusal(const std::string& what);

// Returns the first rank whose word at `index` is not rank 0's; nullopt if there is none.
std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index);

struct PipelineRanks {
  ProcessGroup group;                         // the ranks of a pipeline
  std::optional<ProcessGroup> replicas = {};  // the ranks with the same stages in other pipelines
};

// Runs `check`, which may be collective, and returns its kInvalidArgument error; nullopt if it
// throws none. An error of a failed group is thrown.
std::optional<Error> refusal_of(const std::function<void()>& check);

// Throws `refusal`, an error that either all ranks of a pipeline have or none, on the ranks of all
// its replicas. Also throws on all ranks if these fields differ between replicas.
void agree_with_replicas(const PipelineRanks& ranks, const std::vector<AgreedField>& fields,
                         const std::optional<Error>& refusal);

// agree_on_schedule() throws on all ranks unless all have one schedule and options that fit each
// other, and each stage is held once, by the rank that the schedule says.
struct AgreedSchedule {
  PipelineRanks ranks;
  PipelineSchedule schedule;
};
AgreedSchedule agree_on_schedule(const ProcessGroup& group,
                                 const std::vector<PipelineStage>& stages,
                                 const PipelineOptions& options);

// Throws on all ranks of all replicas unless their stages are alike. Does nothing without replicas.
void check_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);
// Gives all replicas the parameters of rank 0 of `replicas`. Does nothing without replicas.
void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);

}  // namespace cadre::parallel
