// Stores gradients in shards: each rank keeps only the reduced gradients of its own shards of the
// parameters. Whole gradients exist only from their accumulation by autograd until their bucket is
// reduced.
//
// Threads: one at a time. Blocking: the constructor is a collective, because it allocates symmetric
// memory; launch_next() waits for the last but one reduction, whose buffer it reuses. On a device
// these waits order the current stream and do not block the host; reduce_last() does, because the
// trailer is a message of the CPU. Lifetime:
// shares the FlatParameters. The gradients of the shards stay valid after the destruction of this
// object. Errors: kInvalidArgument for a layout of other buckets. A backward throws
// kInvalidArgument if the program has changed the gradients of shards in place (or, with
// refuses_changed_values, the values) while this rank had gradients that were not reduced yet.
//
// There is one bucket for each FlatParameters with a trained parameter. When a bucket is reduced,
// its gradients are multiplied by their factor, written into one of two buffers in the dtype of the
// reduction, and freed. A reduce_scatter gives each rank the gradient of its shard. If other ranks
// have replicas of the shards, an all_reduce over these follows. The result is added to the
// gradient of FlatParameters::values(), or becomes this gradient. The gradient of a parameter that
// no rank used does not change.
//
// Under no_sync() whole gradients accumulate in parameter.grad() until the next pass reduces them.
// The program's optimizer has only the shards, so its zero_grad() clears only the gradients of the
// shards. To notice this, a shard without a gradient gets a gradient of zeros meanwhile
// (unreduced_gradients.h); if that was cleared, the accumulated gradient is dropped. Whole
// gradients that the program assigns, or that exist when this object is constructed, are treated as
// accumulated. If a reducing backward throws, the gradients that it leaves are dropped; if a
// backward under no_sync() throws, the gradients that it has computed stay.
//
// After a shard's gradient was set to none, the next pass reuses its memory, unless the program
// still holds that gradient.
//
// After a pass and until the next backward, the gradients of the whole parameters are placeholders
// that throw on any access (refused_gradients.h). If the program sets a placeholder to none, for
// example by zero_grad() of the module, the next backward clears the gradient of the shard. Source:
// torch.distributed.fsdp; ZeRO stage 2, arXiv:1910.02054.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/buckets/gradient_memory.h"
#include "cadre/parallel/buckets/gradient_storage.h"
#include "cadre/parallel/buckets/refused_gradients.h"
#include "cadre/parallel/buckets/unreduced_gradients.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

class CADRE_EXPORT ShardedGradients final : public GradientStorage {
 public:
  struct Groups {
    wrap::LocatedGroup all;    // all ranks, which reduce the flags in the trailer
    wrap::LocatedGroup shard;  // the ranks that own the shards of one replica; often equal to `all`
    std::optional<wrap::LocatedGroup>
        // The ranks with the same shards as this rank; nullopt if there are no replicas.
        replicate;
  };
  struct Options {
    // The dtype in which gradients are reduced. The default is the dtype in which autograd computes
    // them.
    std::optional<at::ScalarType> reduce_dtype = {};
    std::optional<BucketLayout> layout = {};  // if nullopt, the order is learned in the first pass
    int64_t trailer_numel = 0;
    // The last num_late_units of `units` are reduced only at the end of the backward. They are
    // those of the root, whose gradients become complete late or, if a rank does not use a
    // parameter, only at the end.
    size_t num_late_units = 0;
    std::string wrapper = {};  // the wrapper's name, with which errors begin
    // Tells the program, in the error for an optimizer of whole parameters, from which tensors to
    // make the optimizer.
    std::string remedy = "Make the optimizer from the shards";
    // Called in each pass (one reduction of all gradients), also in an abandoned one, once for each
    // unit with a trained parameter, after the unit's whole gradients were copied and freed. unit:
    // the index in `units`.
    std::function<void(size_t unit)> on_unit_taken = {};
    // Called when a pass (one reduction of all gradients) begins.
    std::function<void()> on_pass = {};
    // Whether it is an error if a shard's values change, by an optimizer step for example, while
    // this rank has gradients that are not reduced.
    bool refuses_changed_values = false;
    // Called when the program has cleared gradients that were accumulated without reduction.
    std::function<void()> on_cleared = {};
    // Called in abandon(), which starts the reductions for which the other ranks wait: before the
    // reduction of each bucket with the bucket's index, and once at the end with the number of
    // buckets.
    std::function<void(size_t launch)> on_abandoned_launch = {};
  };
  // parameters: the trained parameters, each of which is in one of the units. units: in the order
  // in which the first pass reduces them; units without trained parameters are ignored.
  ShardedGradients(std::vector<NamedTensor> parameters,
                   std::span<const std::shared_ptr<shard::FlatParameters>> units, Groups groups,
                   Options options);
  ~ShardedGradients() override;

  void learn(std::span<const int64_t> order) override;
  void place(size_t parameter) override;
  void place_unused(size_t) override {}
  size_t num_early_buckets() const override { return num_buckets(); }
  size_t num_eager_buckets() const override { return num_buckets() - num_late_buckets_; }
  void launch_next() override;
  bool is_last_launched() const override { return is_trailer_launched_; }
  const at::Tensor& trailer() const override { return trailer_; }
  void finish_early() override;
  void reduce_last() override;
  void settle_unused(size_t parameter, const Usage& usage) override;
  void end_pass() override;
  void abandon() override;
  void settle_abandoned() override;
  void keep_local(size_t parameter) override;
  void forget_cleared(std::optional<size_t> just_touched) override;
  void zero_grad(bool set_to_none) override;

 private:
  // Where a trained parameter is.
  struct Slot {
    size_t bucket;
    size_t place;         // the index in the FlatParameters
    at::Tensor leaf;      // FlatParameters::values()
    at::Tensor gradient;  // the slice of Bucket::gradients for the leaf
  };
  struct Bucket {
    size_t unit;
    std::shared_ptr<shard::FlatParameters> flat;
    at::ScalarType dtype;            // the dtype of the reduction
    std::vector<size_t> parameters;  // the trained parameters, in the order of the flat buffer
    at::Tensor gradients;            // (shard_numel), in the dtype of the shard
  };
  // The input buffers of reduce_scatters. The buckets of one dtype use them alternately.
  struct Buffers {
    std::vector<at::Tensor> flats;
    size_t next = 0;
  };
  // A reduction that launch_next() has started, and whose result is not yet added to the shards'
  // gradients.
  struct Reduction {
    const Bucket* bucket;
    const void* buffer;  // the memory that the reduce_scatter reads
    at::Tensor output;   // (shard_numel)
    // The reduce_scatter has ended, and the all_reduce over replicas, if any, has begun.
    bool is_scattered = false;
    std::function<void()> end;  // waits for the operation in flight
  };
  void on_begin_pass() override;
  void begin_arrival(size_t parameter);
  void make_buckets(std::span<const std::shared_ptr<shard::FlatParameters>> units);
  static ShardedBucketSize size_of(const Bucket& bucket);
  void allocate();
  void allocate_buckets();
  // Rearranges the buckets. order: the present indices of the buckets, in their new order.
  void arrange(const std::vector<size_t>& order);
  void follow(const BucketLayout& layout);
  const at::Tensor& free_buffer(const Bucket& bucket);
  void take(const Bucket& bucket, const at::Tensor& buffer);
  at::Tensor output_for(Bucket& bucket);
  void finish_scatter(Reduction& reduction);
  void finish_oldest();
  void add_to_gradients(const Reduction& reduction);
  void add_to_gradient(Slot& slot, const at::Tensor& reduced);
  void slice_gradients(const Bucket& bucket);
  bool is_held(const Slot& slot) const;
  bool is_whole(const Bucket& bucket) const;
  void leave_held_memory(Slot& slot);
  std::string where() const;

  Groups groups_;
  Options options_;
  const c10::Device device_;  // all parameters are on it
  size_t first_late_unit_ = 0;
  size_t num_late_buckets_ = 0;
  std::vector<Bucket> buckets_;  // the buckets, in the order of their reduction
  std::vector<Slot> slots_;      // one slot for each parameter
  std::map<at::ScalarType, Buffers> buffers_;
  at::Tensor trailer_;
  bool is_trailer_launched_ = false;
  std::deque<Reduction> running_;  // the reductions in flight, in the order of launches
  std::vector<std::function<void()>> abandoned_waits_;
  // is_ready_[parameter]: whether this rank contributes a gradient in this pass.
  std::vector<bool> is_ready_;
  // unsettled_[parameter]: a reduced gradient to which this rank has not contributed.
  // settle_unused() adds it to the shard's gradient if another rank has contributed.
  std::vector<at::Tensor> unsettled_;
  // The parameter whose gradient the current backward had changed before the pass (one reduction of
  // all gradients) began; nullopt if there is none.
  std::optional<size_t> just_touched_;
  bool is_in_pass_ = false;
  RefusedGradients refused_;
  UnreducedGradients unreduced_;
  // The index of each leaf's parameter, by the address of the leaf.
  std::unordered_map<const void*, size_t> places_;
};

}  // namespace cadre
