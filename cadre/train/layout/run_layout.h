// How the processes of a run divide the model and the batches among them: the axes of a mesh, from
// the configuration.
//
// The slowest axis comes first: pp (stages of the pipeline), the axes of the strategy along which
// rows differ (dp, or dp_shard, or dp_replicate and dp_shard), cp (tokens), tp (parts of matrices).
//
// Threads: plain values. Blocking: lay_out() is collective; the rest never. Lifetime: keeps the
// groups. Errors: kInvalidArgument, in one sentence that says what must divide what; equal on all
// ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/group/process_group.h"
#include "cadre/mesh/data_ranks.h"
#include "cadre/mesh/device_mesh.h"
#include "cadre/pipeline/schedule.h"
#include "cadre/train/config/config.h"

namespace cadre::train {

// The number of processes along each axis. Their product is the number of processes.
struct Degrees {
  int pipeline = 1;
  int data = 1;  // that have different rows
  int context = 1;
  int tensor = 1;
};

// Throws unless the degrees of the configuration divide the number of processes.
Degrees degrees_of(const ParallelConfig& parallel, int world_size);

// The axes of parallel.strategy, of which the sizes multiply to degrees.data.
std::vector<MeshAxis> data_axes(const ParallelConfig& parallel, const Degrees& degrees);

// "fsdp", or "fsdp, pipeline 2, tensor 2".
std::string layout_name(const ParallelConfig& parallel);

// Throws for a configuration that this number of processes cannot run: degrees, a strategy that
// does not suit the number of replicas, a batch that the microbatches do not divide, a schedule
// with conditions that are not met, a folder for offload that does not exist.
void check_layout(const Config& config, int world_size);

// REQUIRES: check_layout(), parallel.pipeline above 1. The compute-only schedule of a step.
PipelineSchedule pipeline_schedule(const Config& config, const Degrees& degrees);

struct RunLayout {
  ProcessGroup world;
  Degrees degrees;
  std::optional<DeviceMesh> mesh;  // nothing: all processes have the whole layers
  DataRanks data;                  // without a group: all have the same rows
};

// Collective. REQUIRES: check_layout().
RunLayout lay_out(const ParallelConfig& parallel, const ProcessGroup& world);

}  // namespace cadre::train
