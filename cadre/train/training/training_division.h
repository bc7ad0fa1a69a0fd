// How the ranks of a Training divide the work: the strategy, the degrees, and the ranks along each
// axis.
//
// Threads: a plain value. Blocking: the constructor is collective. Lifetime: keeps the groups.
// Errors: kInvalidArgument, equal on all ranks (training_options.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/train/training/training_options.h"

namespace cadre {

namespace training_parts {
inline constexpr const char* kCall = "cadre::Training";  // the begin of errors
}  // namespace training_parts

// All ranks have agreed on the options.
class CADRE_EXPORT TrainingDivision {
 public:
  TrainingDivision(const Ranks& ranks, const TrainingOptions& options);

  DataStrategy strategy() const { return strategy_; }
  const ModelDegrees& degrees() const { return degrees_; }
  // Returns the strategy and the degrees above 1, for example "fsdp, tensor 2".
  std::string name() const;

  // Returns the group of all ranks.
  const ProcessGroup& world() const { return world_; }
  // Returns the ranks over which the wrapper of the strategy works: those with different rows or
  // tokens. Under hsdp they are a mesh of two axes.
  const Ranks& wrapped_ranks() const { return wrapped_; }
  // Returns the ranks that have different rows of a batch.
  const ProcessGroup& rows() const { return rows_ ? *rows_ : wrapped_.group(); }
  // Returns the ranks that have one copy of the model together, which get the same rows; nullopt if
  // each rank has a copy.
  const std::optional<ProcessGroup>& copy() const { return copy_; }
  // Return the ranks that have different layers, different tokens, and parts of the same layers;
  // nullopt if the degree is 1. The meshes have one axis.
  const std::optional<DeviceMesh>& stages() const { return stages_; }
  const std::optional<ProcessGroup>& context() const { return context_; }
  const std::optional<DeviceMesh>& tensor() const { return tensor_; }
  // Returns the groups along the axes that divide parameters; an empty list if there is only one.
  std::vector<ProcessGroup> groups_of_axes() const;

 private:
  struct Choice;
  static Choice agreed(const TrainingOptions& options, const Ranks& ranks);
  TrainingDivision(const Ranks& ranks, const TrainingOptions& options, const Choice& choice);

  DataStrategy strategy_;
  ModelDegrees degrees_;
  ProcessGroup world_;
  Ranks wrapped_;
  std::optional<DeviceMesh> stages_;
  std::optional<ProcessGroup> rows_;
  std::optional<ProcessGroup> copy_;
  std::optional<ProcessGroup> context_;
  std::optional<DeviceMesh> tensor_;
};

}  // namespace cadre
