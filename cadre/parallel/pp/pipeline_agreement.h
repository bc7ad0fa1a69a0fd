// Compares between the ranks of a pipeline, before they compute, the arguments of its constructor
// and of each step. Every rank takes part in the exchange, even if its own arguments are invalid.
// So all ranks, including those of the replicas, throw the same error, and the groups stay usable.
// The exchange itself is in tensor/group/agreement.h.
//
// Threads: one thread. Blocking: collective, until the group's deadline. Errors: if the arguments
// of a rank are invalid, all ranks throw that rank's error; if arguments differ between ranks, all
// ranks throw kInvalidArgument.
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

// The name with which errors of the comparison begin.
inline constexpr const char* kPipelineCall = "cadre::Pipeline";

// Returns the kInvalidArgument error for invalid arguments of a pipeline. `what` describes the
// mistake.
Error pipeline_refusal(const std::string& what);

// Returns the first rank whose words[rank][index] differs from rank 0's; nullopt if there is none.
std::optional<int> first_unlike(const std::vector<std::vector<int64_t>>& words, size_t index);

struct PipelineRanks {
  ProcessGroup group;                         // the ranks of a pipeline
  std::optional<ProcessGroup> replicas = {};  // the ranks with the same stages in other pipelines
};

// Runs `check`, which may be collective, and returns the kInvalidArgument error that it throws;
// nullopt if it throws none. If the group has failed, its error is thrown instead.
std::optional<Error> refusal_of(const std::function<void()>& check);

// If `refusal` is set, throws it on the ranks of all replicas. Either all ranks of a pipeline pass
// such an error or none does. Also throws on all ranks if `fields` differ between replicas.
void agree_with_replicas(const PipelineRanks& ranks, const std::vector<AgreedField>& fields,
                         const std::optional<Error>& refusal);

// Computes the schedule of a pipeline. Throws on all ranks if their schedules or options differ, or
// if a stage is not passed by exactly the rank that the schedule says.
struct AgreedSchedule {
  PipelineRanks ranks;
  PipelineSchedule schedule;
};
AgreedSchedule agree_on_schedule(const ProcessGroup& group,
                                 const std::vector<PipelineStage>& stages,
                                 const PipelineOptions& options);

// Throws on all ranks of all replicas if the replicas' stages have different parameters. Does
// nothing without replicas.
void check_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);
// Broadcasts the parameters of rank 0 of `replicas` to all replicas. Does nothing without replicas.
void equalize_replicas(const std::vector<PipelineStage>& stages, const PipelineRanks& ranks);

}  // namespace cadre::parallel
