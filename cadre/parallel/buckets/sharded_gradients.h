// Gradients that are reduced to their owners only: each rank keeps the reduced gradients of its own
// shards of the parameters, and full gradients live from autograd's accumulation until their bucket
// is reduced.
//
// Threads: one at a time. Blocking: the constructor is collective (it allocates symmetric memory);
// launch_next() waits for the reduction before the last one, whose memory it uses again. Lifetime:
// shares the flat parameters. The gradients of shards stay when this object is gone. Errors:
// kInvalidArgument for a layout of other buckets. A backward throws kInvalidArgument if, while this
// rank has gradients that are not reduced, the program has changed gradients of shards in place or,
// if Options says so, values of shards.
//
// There is one bucket for each FlatParameters with a trained parameter. When it is reduced, its
// gradients are copied into one of two buffers, weighted and in the dtype of the reduction, and
// dropped; a reduce_scatter gives each rank its part of the result, which is added to the gradient
// of FlatParameters::values(), or becomes it. If other ranks hold replicas of the shards, an
// all_reduce over these follows. A gradient of a parameter that no rank used stays as it was.
//
// Without reduction (no_sync()) full gradients accumulate in parameter.grad() until the next pass
// takes them. An optimizer sees the shards' gradients only. So the gradient of a shard also shows
// whether the user has cleared the full gradient: a shard without a gradient gets one of zeros for
// that time (unreduced_gradients.h). Full gradients that the program assigns, or that exist when
// this object is made, count as accumulated in the same way. Gradients left by a reducing backward
// that ended by an exception do not count; a backward without reduction has accumulated what it had
// computed until then.
//
// The next pass uses the memory of a shard's gradient again after the gradient was set to none,
// unless the program still holds that gradient.
//
// After a pass the full parameters have gradients that throw when they are touched, until the next
// backward (refused_gradients.h). If the user sets one of these to none, for example by zero_grad()
// of the module, the gradient of the shard is cleared then.
// Source: torch.distributed.fsdp; ZeRO stage 2, arXiv:1910.02054.
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
    wrap::LocatedGroup all;    // the ranks that reduce the trailer
    wrap::LocatedGroup shard;  // the ranks that own the shards; often `all` itself
    std::optional<wrap::LocatedGroup>
        // The ranks with replicas of this rank's shards; nullopt if there are no replicas.
        replicate;
  };
  struct Options {
    // The dtype in which gradients are summed. The default is the dtype in which autograd computes
    // them.
    std::optional<at::ScalarType> reduce_dtype = {};
    std::optional<BucketLayout> layout = {};  // if nullopt, the order is learned in the first pass
    int64_t trailer_numel = 0;
    // This many of the last `units` are reduced only at the end of backward. They have parameters
    // that a rank may leave unused, so they would complete late, while units are gathered.
    size_t num_late_units = 0;
    std::string wrapper = {};  // errors begin with this name
    // Names the tensors to make the optimizer from, in the error about one made from full
    // parameters.
    std::string remedy = "Make the optimizer from the shards";
    // Called once in a pass, also in an abandoned one, for each unit with a trained parameter, when
    // the full gradients of the unit were copied and dropped. The argument is the unit's index in
    // `units`.
    std::function<void(size_t unit)> on_unit_taken = {};
    // Called when a pass begins.
    std::function<void()> on_pass = {};
    // A change of a shard's values, as a step makes it, is an error while gradients are not
    // reduced. The same rule applies to replicated gradients.
    bool refuses_changed_values = false;
    // Called when the program has cleared gradients that were accumulated and not reduced yet.
    std::function<void()> on_cleared = {};
    // Called on a rank that has left the pass and issues the reductions for which the others wait.
    // It is called before the reduction of each bucket, with the bucket's index, and once at the
    // end with the number of buckets.
    std::function<void(size_t launch)> on_abandoned_launch = {};
  };
  // `parameters` are the trained ones, each in one of the units. `units` are in the order of the
  // first reduction; units without a trained parameter take no part.
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
  // The place of a trained parameter.
  struct Slot {
    size_t bucket;
    size_t place;         // the index in the FlatParameters
    at::Tensor leaf;      // FlatParameters::values()
    at::Tensor gradient;  // the part of Bucket::gradients that belongs to the leaf
  };
  struct Bucket {
    size_t unit;
    std::shared_ptr<shard::FlatParameters> flat;
    at::ScalarType dtype;            // the dtype of the reduction
    std::vector<size_t> parameters;  // the trained parameters, in the order of the flat buffer
    at::Tensor gradients;            // (shard_numel), in the dtype of the shard
  };
  // Memory that is reduced; the buckets of one dtype use it in turn.
  struct Buffers {
    std::vector<at::Tensor> flats;
    size_t next = 0;
  };
  // A reduction between launch_next() and the addition to the shards' gradients.
  struct Reduction {
    const Bucket* bucket;
    const void* buffer;         // the memory that the reduce_scatter reads
    at::Tensor output;          // (shard_numel)
    bool is_scattered = false;  // the all_reduce has begun, or none is needed
    std::function<void()> end;  // waits for the operation that runs
  };
  void on_begin_pass() override;
  void begin_arrival(size_t parameter);
  void make_buckets(std::span<const std::shared_ptr<shard::FlatParameters>> units);
  static ShardedBucketSize size_of(const Bucket& bucket);
  void allocate();
  // `order` has the indices of the present buckets.
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
  size_t first_late_unit_ = 0;
  size_t num_late_buckets_ = 0;
  std::vector<Bucket> buckets_;  // the buckets, in the order of reduction
  std::vector<Slot> slots_;      // has one slot for each parameter
  std::map<at::ScalarType, Buffers> buffers_;
  at::Tensor trailer_;
  bool is_trailer_launched_ = false;
  std::deque<Reduction> running_;  // the running reductions, in the order of launches
  std::vector<std::function<void()>> abandoned_waits_;
  // Says for each parameter whether this rank contributes its gradient.
  std::vector<bool> is_ready_;
  // Has for each parameter a reduced gradient that perhaps no rank has used.
  std::vector<at::Tensor> unsettled_;
  // The parameter that the running backward has touched before its pass begins.
  std::optional<size_t> just_touched_;
  bool is_in_pass_ = false;
  RefusedGradients refused_;
  UnreducedGradients unreduced_;
  // The index of a leaf's parameter; the key is the address of the leaf.
  std::unordered_map<const void*, size_t> places_;
};

}  // namespace cadre
