// Makes a pipeline from the layers of a whole model: divides the layers into stages, gives each
// rank its stages, and ties parameters that layers of different stages share.
//
//   torch::nn::Sequential gpt = make_gpt();                         // the same on all ranks
//   cadre::Pipeline pipeline = cadre::pipeline_of(*gpt, mesh["pp"], {.num_microbatches = 8});
//   torch::optim::AdamW optimizer(pipeline.parameters());
//
// Each layer takes one tensor and returns one, which is the input of the next layer. Parameters
// keep the names that they have in the whole model, so snapshots can be loaded into the undivided
// model and into pipelines with any other number of stages. If layers of several stages have
// registered the same tensor, or a layer is a SharingModule that uses a module of another stage,
// the parameters are tied (Pipeline::tie_parameters()). If a layer uses a parameter of another rank
// in any other way, the step throws. Buffers are not tied: each rank has its own.
//
// Every rank constructs the whole model, which parallelize_module() may have divided before. The
// pipeline keeps the layers of its own stages; the memory of the other layers is freed with the
// model. A model constructed inside defer_init() never allocates that memory: each rank
// materializes the layers of its stages, with the same values that the undivided model would have.
//
// Threads, blocking: as the constructor of Pipeline. Lifetime: the pipeline shares the layers.
// Errors: those of the constructor of Pipeline. Also kInvalidArgument on all ranks if there are
// fewer layers than stages, if the division does not fit the layers or the schedule, if layers or
// divisions differ between the ranks, or if two parameters of layers on different ranks share
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

// Says how layers are divided into stages. All ranks must pass the same values.
struct StageDivision {
  // The number of stages on each rank. nullopt means the usual number of the schedule, which is 2
  // for schedules that support several stages on a rank, else 1. If a PipelineSchedule is passed,
  // leave this out: the PipelineSchedule has its own number.
  std::optional<int> stages_per_rank = {};
  // The number of layers in each stage, in the order of the stages. If empty, the numbers differ by
  // at most one, and the first stages have more. PipelineResult::compute_times shows which stages
  // have too many layers.
  std::vector<int64_t> layers_per_stage = {};
  // See PipelineStageOptions::recompute.
  bool recompute = false;
};

namespace parallel {  // functions of the library itself, not for programs

// Returns the rank of each layer in the pipeline with this schedule that pipeline_of() makes with
// the default StageDivision. Throws kInvalidArgument if there are fewer layers than stages.
CADRE_EXPORT std::vector<int> ranks_of_layers(const torch::nn::SequentialImpl& layers,
                                              const PipelineSchedule& schedule);

}  // namespace parallel

// layers: the model. Its first layer takes the batch, and its last layer returns the output.
CADRE_EXPORT Pipeline pipeline_of(const torch::nn::SequentialImpl& layers, const Ranks& ranks,
                                  const PipelineOptions& options = {},
                                  const StageDivision& division = {});

}  // namespace cadre
