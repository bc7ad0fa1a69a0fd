// Computes which part of a gpt one process has under tensor, expert and pipeline parallelism, and
// how many bytes a step moves between the processes of a replica. Uses only the sizes of the
// parameters.
//
// Threads: pure functions. Lifetime: values. Errors: none.
#pragma once

#include <cstdint>

#include "cadre/parallel/plan/model_sizes.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {

// Returns the sizes on one process: at the given position in the pipeline, and first along the axis
// tp, where the parts are largest. In a pipeline all parameters are in the root unit, because a
// stage is not divided into units. `whole` has the sizes of the configured model. REQUIRES:
// check_layout().
ModelSizes part_sizes(const ModelSizes& whole, const Config& config, const Degrees& degrees,
                      int pipeline_rank);

// Returns the bytes of a tied weight that a process holds twice, because it has the first and the
// last stage of a pipeline; 0 for other processes. Both copies have gradients; only one has an
// optimizer state. `part` is the result of part_sizes(). REQUIRES: check_layout().
int64_t tied_copy_bytes(const ModelSizes& part, const Config& config, const Degrees& degrees,
                        int pipeline_rank);

// The bytes that a process receives in a step from processes that have other parts of the model.
// The algorithms are assumed to be optimal, and messages of a few numbers are not counted. For
// experts, all experts are assumed to be chosen equally often.
struct DivisionTraffic {
  int64_t tensor = 0;
  int64_t context = 0;
  int64_t pipeline = 0;
  int64_t expert = 0;

  int64_t total() const { return tensor + context + pipeline + expert; }
};
// `part` is the result of part_sizes(). REQUIRES: check_layout().
DivisionTraffic division_traffic(const ModelSizes& part, const Config& config,
                                 const Degrees& degrees, int pipeline_rank);

}  // namespace cadre::train
