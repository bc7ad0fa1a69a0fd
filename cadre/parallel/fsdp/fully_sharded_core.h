// Implements everything of FullyShardedDataParallel that does not depend on the module's type.
//
// Threads: forward, backward and every method from one thread. Blocking: the constructor, forward,
// backward and summon() are collective, until the group's deadline. Lifetime: keeps the module and
// the groups alive. Errors: cadre::Error, kInvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/sharded_units.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class Module;
}

namespace cadre {
class FileMemory;
}
namespace cadre::reduction {
class DataParallelCore;
}
namespace cadre::shard {
class FlatBufferPool;
class FlatParameters;
class ShardFence;
}  // namespace cadre::shard

namespace cadre::parallel {

struct UnitAssignment;
class WrittenParameters;

// The process groups of a wrapper. The ranks along the last axis of the mesh each own another shard
// of the parameters. If the mesh has two axes, the ranks along the first one hold the same shards
// (HSDP).
struct CADRE_EXPORT ShardGroups {
  // ranks: a process group, for which a mesh with the axis "shard" is made; or a mesh of one axis
  // (shard) or of two (replicate, then shard).
  static ShardGroups of(const Ranks& ranks);

  DeviceMesh mesh;
  std::string shard_axis;
  ProcessGroup all;
  std::optional<ProcessGroup> shard;  // the ranks along the last axis; nullopt: `all`
  // The ranks along the first of two axes; nullopt: one axis.
  std::optional<ProcessGroup> replicate;
};

class CADRE_EXPORT FullyShardedCore {
 public:
  // First checks, without a change to the module, that it can be sharded and that all ranks have
  // the same model, units and options. Then broadcasts rank 0's values and shards the parameters.
  FullyShardedCore(const std::shared_ptr<torch::nn::Module>& module, ShardGroups groups,
                   FullyShardedDataParallelOptions options);
  ~FullyShardedCore();
  FullyShardedCore(const FullyShardedCore&) = delete;
  FullyShardedCore& operator=(const FullyShardedCore&) = delete;

  // Begins a forward of the root module. num_rows: see DataParallelCore::before_forward().
  ShardedUnits::Call before_forward(std::optional<int64_t> num_rows);
  void after_forward(const ShardedUnits::Call& call, std::span<const at::Tensor> outputs);
  // Called after after_forward(). Throws, on this rank only, if a forward without grad has written
  // to gathered parameters; the other ranks have then completed the forward, too. A write in a
  // forward with grad is reported on all ranks instead, by the backward that reduces the gradients.
  void check_evaluation();
  // Called instead of after_forward() if the forward has thrown.
  void fail_forward() noexcept;
  // Cast the arguments and the results of the root module's forward() as options.precision says.
  at::Tensor cast_input(const at::Tensor& tensor) const;
  at::Tensor cast_output(const at::Tensor& tensor) const;
  bool casts_inputs() const;
  bool casts_outputs() const;

  const std::shared_ptr<reduction::DataParallelCore>& data_parallel() const { return core_; }
  void reduce_gradients();
  std::vector<ParameterShard> parameter_shards() const;

  const std::shared_ptr<shard::ShardFence>& shard_fence() const { return fence_; }
  ShardForm form() const;

  void summon();
  void write_back();
  void dismiss() noexcept;

  // Return the number of bytes of gathered parameters in this rank's memory: now, and at the peak.
  int64_t full_bytes() const;
  int64_t peak_full_bytes() const;
  // Returns the number of bytes in this rank's offload file.
  int64_t file_bytes() const;

 private:
  struct Gathered;  // implements UnitMemory with the FlatParameters of one unit
  struct Construction;

  UnitAssignment agreed_assignment();
  bool shards_have_gradients() const;

  std::shared_ptr<torch::nn::Module> module_;
  ShardGroups groups_;
  FullyShardedDataParallelOptions options_;
  std::shared_ptr<shard::FlatBufferPool> pool_;
  std::shared_ptr<shard::ShardFence> fence_;    // shared with optimizers and FlatParameters
  std::shared_ptr<FileMemory> files_;           // null without offload
  std::shared_ptr<WrittenParameters> written_;  // shared with flats_, which may outlive this object
  std::vector<std::shared_ptr<shard::FlatParameters>> flats_;
  std::vector<at::Tensor> trained_;
  std::shared_ptr<reduction::DataParallelCore> core_;
  std::shared_ptr<ShardedUnits> units_;
};

// Returns *core. Throws kInvalidArgument if `core` is null, because the object that held it was
// moved from, or was made from an object that was moved from. owner: the name of that object's
// class.
CADRE_EXPORT FullyShardedCore& checked(const std::shared_ptr<FullyShardedCore>& core,
                                       std::string_view owner);

}  // namespace cadre::parallel
