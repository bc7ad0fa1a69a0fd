// What the ranks of a pipeline must agree on before they compute: the arguments of its constructor
// and of each step. Every rank takes part in the exchange, also one whose own arguments are
// refused, so that an error is thrown on all ranks and the group stays usable.
//
// Threads: one. Blocking: collective, until the group's deadline. Errors: kInvalidArgument.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/group/process_group.h"
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

// Throws on all ranks unless all have one schedule; a rank without one has refused its arguments.
void check_schedules_match(const ProcessGroup& group, const Result<PipelineSchedule>& schedule);

// Throws on all ranks unless each stage is held once, and where the schedule says.
void check_stages_match(const ProcessGroup& group, const PipelineSchedule& schedule,
                        const std::vector<PipelineStage>& stages);

// Gives all replicas the values of their rank 0; throws on all ranks of the pipeline unless their
// stages are alike. Without replicas it does nothing.
void equalize_replicas(const std::vector<PipelineStage>& stages, const ProcessGroup& group,
                       const std::optional<ProcessGroup>& replicas);

}  // namespace cadre::parallel
