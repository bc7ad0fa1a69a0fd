// Gradients that are reduced to their owners only: each rank keeps the reduced gradients of its own
// shards of the parameters, and full gradients live from autograd's accumulation until their bucket
// is reduced.
//
// Threads: one at a time. Blocking: the constructor is collective (it allocates symmetric memory);
// launch_next() waits for the reduction before the last one, whose memory it uses again.
// Lifetime: shares the flat parameters. The gradients of shards stay when it is gone.
// Errors: kInvalidArgument for a layout of other buckets, and, out of a backward, for gradients of
// shards that the program has changed in place, and if Options says so for shards whose values it
// has changed, while this rank has gradients that are not reduced.
//
// One bucket per FlatParameters with a trained parameter. When its turn comes, its gradients are
// copied into one of two buffers, weighted and in the dtype of the reduction, and dropped; a
// reduce_scatter gives each rank its part of the result, and that is added to the gradient of
// FlatParameters::values(), or becomes it. Where ranks hold replicas of the shards, too, an
// all_reduce over these follows. A gradient of a parameter that no rank used stays as it was.
//
// Without reduction (no_sync()) full gradients accumulate in parameter.grad() until the next pass
// takes them. An optimizer sees the shards' gradients only, so these show, parameter by parameter,
// when the user has cleared them: a shard without a gradient gets one of zeros for that time
// (unreduced_gradients.h). Full gradients that the program assigns, or that are there when this is
// made, count as accumulated in the same way. What a reducing backward leaves that ended by an
// exception does not count; one without reduction has accumulated what it had computed until then.
//
// The memory of a shard's gradient is used again by the next pass after the gradient was set to
// none, unless the program still holds that gradient.
//
// After a pass the full parameters have gradients that throw when they are touched, up to the next
// backward (refused_gradients.h). Where the user has set one of these to none, by
// zero_grad() of the module, the gradient of the shard is cleared then.
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
    wrap::LocatedGroup all;    // which reduces the trailer
    wrap::LocatedGroup shard;  // whose ranks hold the shards; often `all` itself
    std::optional<wrap::LocatedGroup>
        replicate;  // whose ranks hold this rank's shards; may be none
  };
  struct Options {
    // In which gradients are summed; default: the dtype in which autograd computes them.
    std::optional<at::ScalarType> reduce_dtype = {};
    std::optional<BucketLayout> layout = {};  // none: the order is learned in the first pass
    int64_t trailer_numel = 0;
    // The last of `units` that are reduced at the end of backward only: those with parameters that
    // a rank may leave unused, and so complete later than others, while units are gathered.
    size_t num_late_units = 0;
    std::string wrapper = {};  // the name with which errors begin
    // What an optimizer is made from, for one that was made from the full parameters.
    std::string remedy = "Make the optimizer from the shards";
    // The full gradients of a unit were copied and dropped, in a pass; the unit's place in `units`.
    // Called once in a pass for each unit with a trained parameter, also in one that is abandoned.
    std::function<void(size_t unit)> on_unit_taken = {};
    // A pass begins.
    std::function<void()> on_pass = {};
    // Whether it is an error, as of replicated gradients, that the program changes the values of a
    // shard, as a step does, while gradients are not reduced.
    bool refuses_changed_values = false;
    // The program has cleared gradients that were accumulated and not reduced yet.
    std::function<void()> on_cleared = {};
    // This rank has left the pass and issues the reductions that the others wait for: it is about
    // to issue the one of this number, or, with the number of buckets, has issued all.
    std::function<void(size_t launch)> on_abandoned_launch = {};
  };
  // `parameters`: those that are trained, each of one of the units. `units`: in the order in which
  // they are reduced first; those without a trained parameter take no part.
  ShardedGradients(std::vector<NamedTensor> parameters,
                   std::span<const std::shared_ptr<FlatParameters>> units, Groups groups,
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
    size_t place;         // in the FlatParameters
    at::Tensor leaf;      // FlatParameters::values()
    at::Tensor gradient;  // for the leaf: a part of Bucket::gradients
  };
  struct Bucket {
    size_t unit;
    std::shared_ptr<FlatParameters> flat;
    at::ScalarType dtype;            // dtype of the reduction
    std::vector<size_t> parameters;  // the trained ones, in the order of the flat buffer
    at::Tensor gradients;            // (shard_numel), in the dtype of the shard
  };
  // Memory that is reduced, used in turn by the buckets of one dtype.
  struct Buffers {
    std::vector<at::Tensor> flats;
    size_t next = 0;
  };
  // Between launch_next() and the addition to the shards' gradients.
  struct Reduction {
    const Bucket* bucket;
    const void* buffer;         // that the reduce_scatter reads
    at::Tensor output;          // (shard_numel)
    bool is_scattered = false;  // the all_reduce has begun, or there is none
    std::function<void()> end;  // waits for what runs
  };
  void on_begin_pass() override;
  void begin_arrival(size_t parameter);
  void make_buckets(std::span<const std::shared_ptr<FlatParameters>> units);
  static ShardedBucketSize size_of(const Bucket& bucket);
  void allocate();
  // `order`: indices of the present buckets.
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
  std::vector<Bucket> buckets_;  // in the order of reduction
  std::vector<Slot> slots_;      // by parameter
  std::map<at::ScalarType, Buffers> buffers_;
  at::Tensor trailer_;
  bool is_trailer_launched_ = false;
  std::deque<Reduction> running_;  // in the order of launches
  std::vector<std::function<void()>> abandoned_waits_;
  std::vector<bool> is_ready_;          // by parameter: this rank contributes its gradient
  std::vector<at::Tensor> unsettled_;   // by parameter: reduced, but perhaps used by no rank
  std::optional<size_t> just_touched_;  // by the running backward, before its pass begins
  bool is_in_pass_ = false;
  RefusedGradients refused_;
  UnreducedGradients unreduced_;
  std::unordered_map<const void*, size_t> places_;  // the parameter of a leaf
};

}  // namespace cadre
