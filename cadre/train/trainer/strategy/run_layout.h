// Decides how the processes of a run divide the model and the batches: makes the axes of a mesh
// from the configuration.
//
// The slowest axis comes first: pp (stages of the pipeline), the axes of the strategy along which
// rows differ (dp, or dp_shard, or dp_replicate and dp_shard), ep (experts, and different rows), cp
// (tokens), tp (parts of matrices). A model with experts has the axis ep also if it has size 1.
//
// Threads: plain values. Blocking: lay_out() is collective; the rest never. Lifetime: keeps the
// groups. Errors: kInvalidArgument, in one sentence that says what must divide what; equal on all
// ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// The number of processes along each axis. Their product is the number of processes.
struct Degrees {
  int pipeline = 1;
  // The number of processes along the axes of parallel.strategy, which have different rows.
  int data = 1;
  int expert = 1;  // these processes also have different rows
  int context = 1;
  int tensor = 1;

  // Returns how many processes, or groups of processes, have different rows.
  int num_shares() const { return data * expert; }
};

// Throws unless the degrees of the configuration divide the number of processes.
Degrees degrees_of(const ParallelConfig& parallel, int world_size);

// Returns parallel.reshard as a value.
Reshard reshard_of(const ParallelConfig& parallel);

// Returns the axes of parallel.strategy. The product of their sizes is degrees.data.
std::vector<MeshAxis> data_axes(const ParallelConfig& parallel, const Degrees& degrees);
std::vector<std::string> data_axis_names(const ParallelConfig& parallel);

// Returns, for example, "fsdp" or "fsdp, pipeline 2, tensor 2".
std::string layout_name(const ParallelConfig& parallel);

// Throws for a configuration that this number of processes cannot run: for degrees that do not
// divide it, a strategy that does not suit the number of replicas, a batch that the microbatches do
// not divide, a schedule whose conditions are not met, or a folder for offload that does not exist.
void check_layout(const Config& config, int world_size);

// Returns the compute-only schedule of a step. REQUIRES: check_layout(), parallel.pipeline above 1.
PipelineSchedule pipeline_schedule(const Config& config, const Degrees& degrees);

struct RunLayout {
  ProcessGroup world;
  Degrees degrees;
  // If nullopt, all processes have the whole layers, and no layer communicates.
  std::optional<DeviceMesh> mesh;
  DataRanks data;  // if the group is not set, all processes have the same rows
};

// Collective. REQUIRES: check_layout().
RunLayout lay_out(const Config& config, const ProcessGroup& world);

// Returns the axes, in the mesh of a model with experts, along which processes have different
// tokens, be it of different rows or of the same rows.
std::vector<std::string> token_axes(const ParallelConfig& parallel);

}  // namespace cadre::train
