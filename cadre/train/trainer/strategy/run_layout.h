// Decides how the processes of a run divide the model and the batches: makes a mesh from the
// configuration.
//
// The mesh has these axes, the slowest first: pp (stages of the pipeline); the axes of the
// strategy, along which processes have different rows (dp, or dp_shard, or dp_replicate and
// dp_shard); ep (experts, and different rows); cp (tokens); tp (parts of matrices). A model with
// experts has the axis ep even if its size is 1.
//
// Threads: plain values. Blocking: lay_out() is collective, the other functions never block.
// Lifetime: keeps the groups. Errors: kInvalidArgument with a sentence that says which number must
// divide which; equal on all ranks.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <span>
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
  // The number of processes along the axes of parallel.strategy; they have different rows.
  int data = 1;
  int expert = 1;  // these processes have different rows, too
  int context = 1;
  int tensor = 1;

  // Returns the number of processes, or groups of processes, that have different rows.
  int num_shares() const { return data * expert; }
};

// Throws unless the degrees of the configuration divide the number of processes.
Degrees degrees_of(const ParallelConfig& parallel, int world_size);

// Returns parallel.replicas, or its default for one host.
int num_replicas(const ParallelConfig& parallel);
// Sets parallel.replicas, if it is 0, such that each shard group of hsdp is inside of a host.
// Leaves it 0 if all processes are on one host, or if the hosts do not have equally many
// consecutive ranks. `host_of_rank` is Communicator::hosts().
void place_replicas(ParallelConfig& parallel, std::span<const int> host_of_rank);

// Returns parallel.reshard as an enumerator.
Reshard reshard_of(const ParallelConfig& parallel);

// Returns the mesh axes of parallel.strategy. The product of their sizes is degrees.data.
std::vector<MeshAxis> data_axes(const ParallelConfig& parallel, const Degrees& degrees);
std::vector<std::string> data_axis_names(const ParallelConfig& parallel);

// Returns the layout's name, for example "fsdp" or "fsdp, pipeline 2, tensor 2".
std::string layout_name(const ParallelConfig& parallel);

// Throws if the configuration is impossible with this number of processes: the degrees do not
// divide it, the strategy does not suit the number of replicas, the microbatches do not divide the
// batch, a condition of the pipeline schedule is not met, or the folder for offload does not exist.
void check_layout(const Config& config, int world_size);

// Returns the schedule of a step, with computations only. REQUIRES: check_layout(),
// parallel.pipeline above 1.
PipelineSchedule pipeline_schedule(const Config& config, const Degrees& degrees);

struct RunLayout {
  ProcessGroup world;
  Degrees degrees;
  // If nullopt, every process has whole layers, and no layer communicates.
  std::optional<DeviceMesh> mesh;
  // The mesh of hsdp, if `mesh` is nullopt.
  std::optional<DeviceMesh> replicas = {};
  DataRanks data;  // if its group is not set, all processes have the same rows
  c10::Device device = c10::Device(c10::DeviceType::CPU);  // of this process's parameters
};

// Collective. REQUIRES: check_layout().
RunLayout lay_out(const Config& config, const ProcessGroup& world,
                  c10::Device device = c10::Device(c10::DeviceType::CPU));

// Returns the axes, in the mesh of a model with experts, along which processes have different
// tokens: tokens of different rows, or different tokens of the same rows.
std::vector<std::string> token_axes(const ParallelConfig& parallel);

}  // namespace cadre::train
