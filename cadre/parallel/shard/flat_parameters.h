// Parameters of one dtype whose values lie in one flat buffer. Every rank of a group owns one shard
// of it; the whole buffer exists only at times: the parameters are then unsharded, else sharded.
// Wrappers and pipeline stages call the methods.
//
// Threads: one at a time. Blocking: the constructor (a collective: it allocates memory that the
// ranks share), wait_unsharded(), and, while a gather runs, reshard() and with keep_full the
// destructor, each until the group's deadline. Every rank makes the same calls in the same order.
// Lifetime: shares the parameters and the group. When this object is gone, the parameters stay as
// they are, whole or sharded. Errors: cadre::Error. The values of a failed gather are not used: the
// parameters are sharded then, or, with keep_full, unusable until a gather succeeds. libtorch
// throws the sentence of Options::remedy if a parameter is touched while it is sharded. What the
// program writes to gathered parameters would be lost when their buffer is freed; freeing the
// buffer then throws (kInvalidArgument; kCorruption if other ranks read the same memory), or calls
// Options::on_written.
//
// A parameter keeps its identity, sizes, requires_grad, hooks and, unless the shards have changed
// since the last gather, its version counter, so that a backward may go through a buffer that was
// freed and filled again; after a change autograd refuses that, as after any change in place.
// Source: torch.distributed.fsdp.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/flat_storage.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::wrap {
class WriteWatch;
}

namespace cadre {
class FileMemory;
}

namespace cadre::shard {

struct ParameterDivision;

struct FlatParametersOptions {
  ShardForm form = ShardForm::kGathered;
  // Dtype of the full parameters; default: the dtype of the shard, which is the original one.
  std::optional<at::ScalarType> compute_dtype = {};
  // Alignment of shards and of tensors, in elements; see FlatAlignment.
  int64_t alignment = kFlatAlignment;
  // The buffer always exists, in memory that the ranks of a host share; the shard is then a part of
  // it, unless the compute dtype is another one. reshard() is not allowed.
  bool keep_full = false;
  // The name of the parameters in messages: "unit \"blocks.3\" of FullyShardedDataParallel".
  std::string name = {};
  // The remedy in the error for an access to sharded parameters.
  std::string remedy = "call unshard_async() and wait_unsharded() before";
  // Pool of buffers to share with other FlatParameters; default: a new pool.
  std::shared_ptr<FlatBufferPool> pool = {};
  // All FlatParameters whose shards the same updates write share it. The default is a new fence.
  std::shared_ptr<ShardFence> fence = {};
  // The file in which the shard lies; default: memory. Only with kGathered, without keep_full.
  std::shared_ptr<FileMemory> files = {};
  // Used by reshard_onto_group(): consecutive ranks of the group; of 8 ranks in groups of 2, for
  // example ranks 4 and 5. Given on all ranks, with equal sizes.
  std::optional<wrap::LocatedGroup> reshard_group = {};
  // Called, if set, when the program has written to a gathered parameter. Otherwise check_written()
  // and the calls that free the buffer throw the error; but a rank that throws alone inside of a
  // forward leaves the others. Does not throw.
  std::function<void(const std::string& parameter, const Error& error)> on_written = {};
};

class CADRE_EXPORT FlatParameters : public std::enable_shared_from_this<FlatParameters> {
 public:
  using Options = FlatParametersOptions;

  // Returns the FlatParameters whose shard has the `values` of the ParameterShard with this memory;
  // null if there are none.
  static const std::shared_ptr<FlatParameters>& of(const ShardMemory& memory) {
    return memory.flat_;
  }

  // Takes over the parameters: distinct leaves of one dtype that a group moves, dense, on the CPU,
  // which share no memory with each other; any shape. They become contiguous, with the compute
  // dtype. If that is another dtype, their gradient accumulators are replaced, so set hooks
  // afterwards, and a parameter that has a gradient is an error. The shard is cut out of this
  // rank's values: broadcast them before if ranks may differ. Afterwards the parameters are
  // sharded, or unsharded with keep_full. group: the ranks along the shard axis.
  FlatParameters(std::vector<NamedTensor> parameters, wrap::LocatedGroup group,
                 Options options = {});
  ~FlatParameters();
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;

  const FlatLayout& layout() const { return memory_.layout(); }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const std::string& name() const { return options_.name; }
  const wrap::LocatedGroup& group() const { return group_; }
  // Returns whether the ranks read the shards in place. It is equal on all ranks.
  bool is_mapped() const { return parts_.has_value(); }
  const std::shared_ptr<ShardFence>& fence() const { return options_.fence; }
  // Returns whether the whole parameters always exist. Then the shard may be written at any time,
  // and gather_changed() updates the parameters; else it is written in updates of the fence.
  bool keeps_full() const { return options_.keep_full; }
  // The values that this rank owns, (shard_numel), in the original dtype of the parameters. If they
  // are written while a gather runs, the ranks get them with the next unshard_async().
  const at::Tensor& shard() const { return shard_; }
  // The part of a parameter that is in the shard, (range(parameter, rank).size()): a leaf that
  // shares the shard's memory and requires grad if the parameter does.
  const at::Tensor& values(size_t parameter) const { return values_[parameter]; }
  // Returns the ParameterShards of these parameters, for snapshots and norms. mesh: a mesh whose
  // axis `flat_axis` has this group; along the other axes all ranks hold the same. If parameters
  // were divided before, their ParameterShards have the axes of both meshes.
  std::vector<ParameterShard> parameter_shards(const DeviceMesh& mesh,
                                               const std::string& flat_axis) const;

  // Returns whether the parameters may be read and have the values of the shards.
  bool is_unsharded() const { return state_ == State::kFull && !is_stale_; }
  // Returns whether a gather runs, so that unshard_async() would start nothing.
  bool is_gathering() const { return state_ == State::kGathering; }
  // Starts to fill the buffer from the shards of all ranks, unless it is full and current, or its
  // gather runs. If the shards were written since that gather began, waits for it and starts
  // another one. Any access to a parameter throws until wait_unsharded().
  void unshard_async();
  void wait_unsharded();
  // Frees the buffer, unless it is a mapping. Waits first for a gather that runs.
  void reshard();
  // Frees the buffer except for this rank's part of it among the ranks of reshard_group, from which
  // the next unshard_async() fills it again, unless the shards have changed. Without such a group,
  // and for a mapping, does the same as reshard().
  void reshard_onto_group();
  // Called when the shards have changed, or will change before the next unshard_async(), which then
  // fills the buffer again.
  void mark_stale();
  // Returns whether this rank's shard has changed since the last gather, which is running or has
  // filled the buffer. A write through at::Tensor::data() is noticed only by a rank that has
  // elements of it.
  bool is_outdated() const;
  // Called before a backward if keep_full is set. Makes autograd throw from the backward if it has
  // saved parameters whose values have changed since, because the program has written to the
  // shards. A write through at::Tensor::data() is not noticed. The next unshard_async() gathers.
  void show_writes() {
    if (options_.keep_full && is_unsharded() && is_outdated()) bump_versions();
  }
  // Gives this rank a copy of the parameters, to which the program may write until they are
  // resharded. They must be unsharded.
  void make_private();
  // Copies this rank's part of the parameters to the shard, the reverse of a gather; the program
  // has changed the parameters in the same way on all ranks. If the compute dtype differs, an
  // element that was not changed keeps the value that its owner had. The parameters must be
  // unsharded, or have been unsharded until an update of the fence began; mapped parameters must be
  // private, and in an update.
  void take_from_parameters();
  // Throws if a parameter, or this rank's shard of it, has been given other memory, by set_data()
  // for example. Gathers make this check, too.
  void check_in_place() const;
  // If the program has written to the parameters since they were unsharded, throws once, or calls
  // Options::on_written. reshard() makes this check, too.
  void check_written() {
    if (is_unsharded() && !is_private_) check_unwritten();
  }

 private:
  friend class ShardFence;
  friend void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed);
  enum class State : uint8_t { kSharded, kOnGroup, kGathering, kFull };

  void check_parameters() const;
  void make_memory();
  void take_over_parameters();
  at::ScalarType dtype() const { return memory_.dtype(); }
  at::ScalarType compute_dtype() const { return memory_.compute_dtype(); }
  bool shares_memory() const { return memory_.shares_memory(); }
  bool keeps_buffer() const { return memory_.keeps_whole(); }
  // Makes the mapping, if all ranks can.
  void map_memory();
  at::Tensor own_part_of(const at::Tensor& whole) const;
  at::Tensor gather_input();
  void start_gather();
  void finish_gather();
  void drop_gather();
  void free_buffer();
  // Makes autograd throw from a backward through graphs that were made before the shards changed.
  void bump_versions();
  void end_private();
  void guard(const std::string& reason);
  // The number of writes to this rank's shard, and a digest of one element of each parameter's
  // part. The digest almost certainly changes when an optimizer writes through at::Tensor::data().
  struct ShardState {
    uint32_t version = 0;
    uint64_t samples = 0;

    bool operator==(const ShardState&) const = default;
  };
  uint32_t version_of_shard() const;
  ShardState state_of_shard() const;
  std::vector<NamedTensor> named_values() const;
  void check_shards_in_place() const;
  // Throws, or reports, if the program has written to the parameters since they were unsharded.
  void check_unwritten();
  [[noreturn]] void refuse_use(const std::string& problem) const;
  // Called by the fence, for mapped shards, when an update begins and when it ends.
  void allow_writes();
  void end_writes();
  void guard_writes();

  std::vector<NamedTensor> parameters_;
  wrap::LocatedGroup group_;
  Options options_;
  FlatMemory memory_;
  State state_ = State::kSharded;
  bool is_stale_ = false;
  // (numel), in the compute dtype; the parameters are views of it. Its memory is that of buffer_,
  // or it has no memory.
  GuardedStorage flat_;
  at::Tensor buffer_;   // is undefined while the parameters are sharded
  at::Tensor private_;  // has the shape (numel); a copy for the parameters if others read buffer_
  // The part of the buffer that reshard_onto_group() has kept, until the buffer is full again.
  at::Tensor part_;
  at::Tensor shard_;
  at::Tensor sent_;  // has the shape (shard_numel) and the compute dtype, if that differs
  std::optional<SymmetricTensor> parts_;
  std::vector<at::Tensor> values_;
  // Says for each parameter whether it was trained when it was sharded.
  std::vector<bool> is_trained_;
  // The divisions, by parameter, of those that were divided before.
  std::vector<std::shared_ptr<const ParameterDivision>> divisions_;
  std::function<void()> wait_;        // waits for the running gather
  ShardState gathered_;               // the state of the shard when that gather began
  std::optional<ShardState> filled_;  // the state of the shard that last filled the parameters
  std::unique_ptr<wrap::WriteWatch> shard_watch_;  // watches values_
  std::unique_ptr<wrap::WriteWatch> written_;      // watches the parameters since they became full
  bool is_private_ = false;                        // the program may write to the parameters
};

// Called when a program has changed `values` of ParameterShards with these FlatParameters, on all
// ranks, between two steps. Gathers those with keep_full, whose whole parameters have old values;
// the others are gathered when they are used next. Collective.
CADRE_EXPORT void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed);

// Reaches what wrappers keep from programs, for the tools of other folders.
struct WrapperAccess {
  // Returns the buffers of the parameters. If the list is empty, gradients are whole on every rank.
  template <typename Model>
  static auto flat_parameters(const Model& model) -> decltype(model.flat_parameters()) {
    return model.flat_parameters();
  }
  // Returns the fence of the updates that write the shards.
  template <typename Model>
  static auto shard_fence(const Model& model) -> decltype(model.shard_fence()) {
    return model.shard_fence();
  }
};

// A wrapper that may keep its parameters in such buffers.
template <typename Model>
concept HasFlatParameters = HasParameterShards<Model> && requires(const Model& model) {
  {
    WrapperAccess::flat_parameters(model)
  } -> std::convertible_to<std::vector<std::shared_ptr<FlatParameters>>>;
};

}  // namespace cadre::shard
