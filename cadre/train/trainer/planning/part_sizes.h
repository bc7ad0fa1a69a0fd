// Computes which part of a gpt one process has under tensor, expert and pipeline parallelism, and
// what a step moves between the processes of a replica: from sizes alone.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: none.
#pragma once

#include <cstdint>

#include "cadre/parallel/plan/model_sizes.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {

// Returns the sizes on the process at this place in the pipeline that is first along tp, because
// that one has the largest parts. In a pipeline all parameters are in the root: a stage is not
// divided into units. whole: sizes of the configured model. REQUIRES: check_layout().
ModelSizes part_sizes(const ModelSizes& whole, const Config& config, const Degrees& degrees,
                      int pipeline_rank);

// Returns the bytes of a tied weight that a process holds twice, because it has the first and the
// last stage of a pipeline; 0 for other processes. Both copies have gradients; only one has an
// optimizer state. part: the result of part_sizes(). REQUIRES: check_layout().
int64_t tied_copy_bytes(const ModelSizes& part, const Config& config, const Degrees& degrees,
                        int pipeline_rank);

// Bytes that a process receives in a step from processes with other parts of the model, with
// optimal algorithms and without agreements of a few numbers. The bytes of experts hold if all
// experts are chosen equally often.
struct DivisionTraffic {
  int64_t tensor = 0;
  int64_t context = 0;
  int64_t pipeline = 0;
  int64_t expert = 0;

  int64_t total() const { return tensor + context + pipeline + expert; }
};
// part: the result of part_sizes(). REQUIRES: check_layout().
DivisionTraffic division_traffic(const ModelSizes& part, const Config& config,
                                 const Degrees& degrees, int pipeline_rank);

}  // namespace cadre::train
