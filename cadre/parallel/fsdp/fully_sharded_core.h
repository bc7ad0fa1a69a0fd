// Everything of FullyShardedDataParallel that does not depend on the module's type.
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

// The ranks of a wrapper: along the last axis of the mesh each owns a shard of the parameters;
// along the axis before it, if there is one, ranks hold the same shards (HSDP).
struct CADRE_EXPORT ShardGroups {
  // ranks: a group, which becomes the axis "shard"; or a mesh of one axis, or of two: replicate,
  // then shard.
  static ShardGroups of(const Ranks& ranks);

  DeviceMesh mesh;
  std::string shard_axis;
  ProcessGroup all;
  std::optional<ProcessGroup> shard;      // if nullopt, it is the same as `all`
  std::optional<ProcessGroup> replicate;  // nullopt if the mesh has one axis
};

class CADRE_EXPORT FullyShardedCore {
 public:
  // Checks that the model can be sharded and that the ranks hold the same model, units and options,
  // before anything is changed. Then copies rank 0's values to all, and shards.
  FullyShardedCore(const std::shared_ptr<torch::nn::Module>& module, ShardGroups groups,
                   FullyShardedDataParallelOptions options);
  ~FullyShardedCore();
  FullyShardedCore(const FullyShardedCore&) = delete;
  FullyShardedCore& operator=(const FullyShardedCore&) = delete;

  // `num_rows`: see DataParallelCore::before_forward().
  ShardedUnits::Call before_forward(std::optional<int64_t> num_rows);
  void after_forward(const ShardedUnits::Call& call, std::span<const at::Tensor> outputs);
  // Called after after_forward(). Throws if a forward without grad has written to parameters; the
  // other ranks have ended the forward, too. After a forward with grad, the pass that reduces the
  // gradients throws instead, on all ranks.
  void check_evaluation();
  // Called when the forward ended by an exception.
  void fail_forward() noexcept;
  // Cast the arguments and results of the root's forward().
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

  // Return the bytes of full parameters in this rank's memory now, and their peak.
  int64_t full_bytes() const;
  int64_t peak_full_bytes() const;
  // Returns the number of bytes in this rank's files.
  int64_t file_bytes() const;

 private:
  struct Gathered;  // implements UnitMemory with the flat parameters of one unit
  struct Construction;

  UnitAssignment agreed_assignment();
  bool shards_have_gradients() const;

  std::shared_ptr<torch::nn::Module> module_;
  ShardGroups groups_;
  FullyShardedDataParallelOptions options_;
  std::shared_ptr<shard::FlatBufferPool> pool_;
  std::shared_ptr<shard::ShardFence> fence_;    // optimizers and parameter shards use it, too
  std::shared_ptr<FileMemory> files_;           // the tensors in it share it; null without offload
  std::shared_ptr<WrittenParameters> written_;  // flats_ shares it, and other objects share flats_
  std::vector<std::shared_ptr<shard::FlatParameters>> flats_;
  std::vector<at::Tensor> trained_;
  std::shared_ptr<reduction::DataParallelCore> core_;
  std::shared_ptr<ShardedUnits> units_;
};

// Returns the core of an object that shares it. Throws kInvalidArgument if the core is null: the
// object was moved from, or made from such an object. owner: the object's class.
CADRE_EXPORT FullyShardedCore& checked(const std::shared_ptr<FullyShardedCore>& core,
                                       std::string_view owner);

}  // namespace cadre::parallel
