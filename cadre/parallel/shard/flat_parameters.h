// Parameters of one dtype whose values lie in one flat buffer. Every rank of a group owns one shard
// of the buffer. The parameters are unsharded while the whole buffer is in memory, and sharded
// while only the shard is. Wrappers and pipeline stages call the methods.
//
// Threads: one at a time. On a device every call belongs to the current stream of that device: it
// waits for what was enqueued there, and later work of that stream finds the result, so no call
// waits for the device on the host. Blocking: the constructor, which is a collective because it
// allocates memory that the ranks share; wait_unsharded(); while a gather is in flight, also
// reshard() and, with keep_full, the destructor. Each waits until the group's deadline. Every rank
// makes the same calls in the same order. Lifetime: shares the parameters and the group. After the
// destruction of this object the parameters stay as they are, whole or sharded. Errors:
// cadre::Error. After a failed gather the parameters are sharded or, with keep_full, unusable until
// a gather succeeds. An access to a sharded parameter throws c10::Error with the text of
// Options::remedy. If the program writes to gathered parameters, the change would be lost with the
// buffer. So freeing the buffer then throws kInvalidArgument, or kCorruption if other ranks read
// the same memory, or calls Options::on_written.
//
// A parameter stays the same tensor object with the same sizes, requires_grad and hooks. Its
// version counter changes only if the shards have changed since the last gather. So a backward may
// use a buffer that was freed after the forward and gathered again. If the shards have changed in
// between, autograd throws as after any change in place. Source: torch.distributed.fsdp.
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
  // The whole buffer stays in memory that the ranks of a host share, and is never freed. The shard
  // is a part of it, unless the compute dtype differs from the shard's. reshard() is then an error.
  bool keep_full = false;
  // The name of the parameters in messages: "unit \"blocks.3\" of FullyShardedDataParallel".
  std::string name = {};
  // What the error for an access to sharded parameters tells the program to do.
  std::string remedy = "call unshard_async() and wait_unsharded() before";
  // Pool of buffers to share with other FlatParameters; default: a new pool.
  std::shared_ptr<FlatBufferPool> pool = {};
  // The ShardFence, which orders updates of shards and other accesses to them. FlatParameters whose
  // shards are written by the same updates share one. The default is a new one.
  std::shared_ptr<ShardFence> fence = {};
  // Where the shard is allocated if it is to lie in a file; default: in memory. Allowed only with
  // kGathered, without keep_full, and for parameters on the CPU.
  std::shared_ptr<FileMemory> files = {};
  // The ranks among which reshard_onto_group() divides the buffer. They are consecutive ranks of
  // the group: if 8 ranks have groups of 2, the group of rank 4 has ranks 4 and 5. All ranks pass a
  // group, and the groups have equal sizes.
  std::optional<wrap::LocatedGroup> reshard_group = {};
  // Called, if set, with the error that says that the program has written to a gathered parameter;
  // it must not throw. If not set, check_written() and the calls that free the buffer throw this
  // error. FullyShardedDataParallel sets it, because a rank that throws alone inside of a forward
  // leaves the other ranks waiting.
  std::function<void(const std::string& parameter, const Error& error)> on_written = {};
};

class CADRE_EXPORT FlatParameters : public std::enable_shared_from_this<FlatParameters> {
 public:
  using Options = FlatParametersOptions;

  // Returns the FlatParameters in whose shard the `values` of a ParameterShard with this memory
  // lie; null if `values` lie in other memory.
  static const std::shared_ptr<FlatParameters>& of(const ShardMemory& memory) {
    return memory.flat_;
  }

  // Moves the values of the parameters into the buffer and this rank's shard. The parameters are
  // distinct dense leaves of one dtype that collectives support, on the CPU or on the group's
  // device, and share no memory with each other. They become contiguous, with the compute dtype. If
  // this changes their dtype, their gradient accumulators are replaced, so set hooks afterwards; a
  // parameter that has a gradient is then an error. The shard gets the values that the parameters
  // have on this rank: broadcast them before if ranks may differ. Afterwards the parameters are
  // sharded or, with keep_full, unsharded. group: the ranks that own the shards.
  FlatParameters(std::vector<NamedTensor> parameters, wrap::LocatedGroup group,
                 Options options = {});
  ~FlatParameters();
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;

  const FlatLayout& layout() const { return memory_.layout(); }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const std::string& name() const { return options_.name; }
  const wrap::LocatedGroup& group() const { return group_; }
  // Returns whether the ranks map and read each other's shards in place. The result is equal on all
  // ranks.
  bool is_mapped() const { return parts_.has_value(); }
  const std::shared_ptr<ShardFence>& fence() const { return options_.fence; }
  // Returns whether the whole parameters are never freed. If so, the shard may be written at any
  // time, and gather_changed() then updates the parameters. If not, the shard is written only in
  // updates of the fence.
  bool keeps_full() const { return options_.keep_full; }
  // Returns the values that this rank owns, (shard_numel), in the original dtype of the parameters.
  // Values that are written while a gather is in flight reach the other ranks with the next
  // unshard_async().
  const at::Tensor& shard() const { return shard_; }
  // Returns the elements of a parameter that are in this rank's shard, (range(parameter,
  // rank).size()): a leaf that shares the shard's memory and requires grad if the parameter does.
  const at::Tensor& values(size_t parameter) const { return values_[parameter]; }
  // Returns the ParameterShards of these parameters, for snapshots and norms. mesh: a mesh whose
  // axis `flat_axis` consists of the ranks of group(); ranks along its other axes hold replicas. If
  // a parameter was divided before, its ParameterShard has the axes of both meshes.
  std::vector<ParameterShard> parameter_shards(const DeviceMesh& mesh,
                                               const std::string& flat_axis) const;

  // Returns whether the parameters may be read and have the current values of the shards.
  bool is_unsharded() const { return state_ == State::kFull && !is_stale_; }
  // Returns whether a gather is in flight.
  bool is_gathering() const { return state_ == State::kGathering; }
  // Starts to gather the shards of all ranks into the buffer. Does nothing if the buffer has the
  // current values, or if a gather is in flight; but if shards were written since that gather
  // began, waits for it and starts another one. Any access to a parameter throws until
  // wait_unsharded().
  void unshard_async();
  void wait_unsharded();
  // Frees the buffer, unless it is a mapping of the shards. First waits for a gather that is in
  // flight.
  void reshard();
  // Divides the buffer among the ranks of reshard_group: keeps this rank's part and frees the rest.
  // The next unshard_async() gathers only within that group, unless the shards have changed. Does
  // the same as reshard() if there is no reshard_group, or if the buffer is a mapping.
  void reshard_onto_group();
  // Must be called when the shards have changed, or will change before the next unshard_async().
  // The next unshard_async() then gathers again. If they have changed, the version counters of the
  // parameters are incremented here, and not only by the gather: so a view that is made in between,
  // as torch::nn::Linear makes of its weight, is not older than its values, and autograd need not
  // compute the view's gradient by as_strided(), with a copy.
  void mark_stale();
  // Returns whether this rank's shard has changed since the last gather began. A write through
  // at::Tensor::data() is noticed only on a rank that owns elements of the written parameter.
  bool is_outdated() const;
  // Called before a backward if keep_full is set. If the program has written to the shards since
  // the forward, increments the version counters of the parameters, so that autograd throws from a
  // backward that uses saved parameters. A write through at::Tensor::data() is not noticed. The
  // next unshard_async() gathers the new values.
  void show_writes() {
    if (options_.keep_full && is_unsharded() && is_outdated()) show_state(state_of_shard());
  }
  // Gives this rank a copy of the parameters, to which the program may write until they are
  // resharded. They must be unsharded.
  void make_private();
  // Copies this rank's part of the parameters to its shard, after the program has changed the
  // parameters in the same way on all ranks. If the compute dtype differs from the shard's,
  // elements that were not changed keep their exact values in the shard. The parameters must be
  // unsharded, or have been unsharded when the running update of the fence began. Mapped parameters
  // need make_private() before the change, and an update.
  void take_from_parameters();
  // Throws if a parameter, or this rank's shard of it, has been given other memory, by set_data()
  // for example. Gathers make this check, too.
  void check_in_place() const;
  // If the program has written to the parameters since they were unsharded, throws an error once,
  // or calls Options::on_written. reshard() makes this check, too.
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
  c10::Device device() const { return parameters_.front().tensor.device(); }
  at::ScalarType compute_dtype() const { return memory_.compute_dtype(); }
  bool shares_memory() const { return memory_.shares_memory(); }
  bool keeps_buffer() const { return memory_.keeps_whole(); }
  // Maps the shards of all ranks contiguously, if all ranks are able to.
  void map_memory();
  at::Tensor own_part_of(const at::Tensor& whole) const;
  at::Tensor gather_input();
  void start_gather();
  void finish_gather();
  void drop_gather();
  void free_buffer();
  void end_private();
  void guard(const std::string& reason);
  // The number of writes to this rank's shard that autograd has counted, and a hash of one element
  // of each parameter in the shard. The hash almost certainly changes when an optimizer writes
  // through at::Tensor::data(), which autograd does not count.
  struct ShardState {
    uint32_t version = 0;
    uint64_t samples = 0;

    bool operator==(const ShardState&) const = default;
  };
  uint32_t version_of_shard() const;
  ShardState state_of_shard() const;
  // Increments the version counters of the parameters if they stand for another state of the shard:
  // autograd then throws from a backward of a graph that was made before the shards changed.
  void show_state(const ShardState& state);
  std::vector<NamedTensor> named_values() const;
  void check_shards_in_place() const;
  // Throws, or calls Options::on_written, if the program has written to the parameters since they
  // were unsharded.
  void check_unwritten();
  [[noreturn]] void refuse_use(const std::string& problem) const;
  // ShardFence calls allow_writes() when an update of mapped shards begins, and end_writes() when
  // it ends.
  void allow_writes();
  void end_writes();
  void guard_writes();

  std::vector<NamedTensor> parameters_;
  wrap::LocatedGroup group_;
  Options options_;
  FlatMemory memory_;
  State state_ = State::kSharded;
  bool is_stale_ = false;
  // The flat tensor (numel) in the compute dtype, of which the parameters are views. It has the
  // memory of buffer_ or private_, or none while the parameters are sharded.
  GuardedStorage flat_;
  at::Tensor buffer_;  // is undefined while the parameters are sharded
  // (numel): the copy that make_private() makes if buffer_ must not be written.
  at::Tensor private_;
  // The part of the buffer that reshard_onto_group() has kept, until the buffer is full again.
  at::Tensor part_;
  at::Tensor shard_;
  at::Tensor sent_;  // (shard_numel): the shard in the compute dtype, if that is another one
  std::optional<SymmetricTensor> parts_;
  std::vector<at::Tensor> values_;
  // Says for each parameter whether it was trained when it was sharded.
  std::vector<bool> is_trained_;
  // divisions_[parameter]: how the parameter was divided before, or null.
  std::vector<std::shared_ptr<const ParameterDivision>> divisions_;
  std::function<void()> wait_;  // waits for the gather in flight
  // On a device: the point in the stream that has waited for the last gather, behind which the
  // parameters may be read; null for the CPU.
  std::shared_ptr<const DevicePoint> gathered_by_;
  ShardState gathered_;               // the state of the shard when the last gather began
  std::optional<ShardState> filled_;  // the state of the shard whose values the parameters last had
  // The state of the shard for which the version counters of the parameters stand.
  std::optional<ShardState> shown_;
  std::unique_ptr<wrap::WriteWatch> shard_watch_;  // notices writes to values_
  std::unique_ptr<wrap::WriteWatch> written_;      // notices writes to unsharded parameters
  bool is_private_ = false;  // set by make_private(): the program may write to the parameters
};

// Called on all ranks when the program has changed, between two steps, `values` of ParameterShards
// that lie in these FlatParameters. Gathers FlatParameters with keep_full at once, because their
// whole parameters still have the old values. The others are gathered at their next use.
// Collective.
CADRE_EXPORT void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed);

// Gives other folders of the library access to members of wrappers that are private to programs.
struct WrapperAccess {
  // Returns the FlatParameters of the wrapper. If the list is empty, every rank has whole
  // gradients.
  template <typename Model>
  static auto flat_parameters(const Model& model) -> decltype(model.flat_parameters()) {
    return model.flat_parameters();
  }
  // Returns the ShardFence of the updates that write the shards.
  template <typename Model>
  static auto shard_fence(const Model& model) -> decltype(model.shard_fence()) {
    return model.shard_fence();
  }
};

// A wrapper that may keep its parameters in FlatParameters.
template <typename Model>
concept HasFlatParameters = HasParameterShards<Model> && requires(const Model& model) {
  {
    WrapperAccess::flat_parameters(model)
  } -> std::convertible_to<std::vector<std::shared_ptr<FlatParameters>>>;
};

}  // namespace cadre::shard
