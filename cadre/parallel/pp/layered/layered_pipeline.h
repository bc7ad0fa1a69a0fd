// Makes a pipeline of the layers of a whole model: divides them into stages, gives each rank its
// stages, and ties what layers of different stages share.
//
//   torch::nn::Sequential gpt = make_gpt();                         // the same on all ranks
//   cadre::Pipeline pipeline = cadre::pipeline_of(*gpt, mesh["pp"], {.num_microbatches = 8});
//   torch::optim::AdamW optimizer(pipeline.parameters());
//
// Each layer takes one tensor and returns one, which is the input of the next layer. Parameters
// keep the names that they have in the whole model, so snapshots load into the plain model and
// under any other number of stages. A tensor that layers of several stages have registered, and
// what a layer uses of another one as a SharingModule does, is tied: Pipeline::tie_parameters().
// A step in which a layer uses a parameter of another rank in any other way throws. Buffers are not
// tied: each rank has its own.
//
// Every rank constructs the whole model, which may be divided by parallelize_module() before. The
// pipeline keeps the layers of its own stages; the memory of the others is released with the
// model. A model that was constructed inside of defer_init() never has that memory: each rank
// materializes the layers of its stages, and they have the values of the plain model.
//
// Threads, blocking: as the constructor of Pipeline. Lifetime: the pipeline shares the layers.
// Errors: those of the constructor of Pipeline; also kInvalidArgument on all ranks for fewer layers
// than stages, for a division that does not fit the layers or the schedule, for layers or divisions
// that differ between the ranks, and for two parameters of layers on different ranks that share
// memory.
// Source: DeepSpeed's PipelineModule.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class SequentialImpl;
}

namespace cadre {

// Says how layers are divided into stages. All ranks pass the same.
struct StageDivision {
  // The number of stages that each rank has. nullopt means the usual one of the schedule, which is
  // 2 for schedules with several stages on a rank. A PipelineSchedule has its own number.
  std::optional<int> stages_per_rank = {};
  // The number of layers in each stage, in the order of the stages. If it is empty, the numbers
  // differ by one at most, and the first stages have more. PipelineResult::compute_times tells
  // which stages have too many.
  std::vector<int64_t> layers_per_stage = {};
  // See PipelineStageOptions.
  bool recompute = false;
};

// layers: the model, whose first layer takes the batch and whose last one returns the output.
CADRE_EXPORT Pipeline pipeline_of(const torch::nn::SequentialImpl& layers, const Ranks& ranks,
                                  const PipelineOptions& options = {},
                                  const StageDivision& division = {});

}  // namespace cadre
