// Defines the interface of a class that stores gradients while and after they are reduced over the
// ranks. The reducer (reduction/reducer.h) decides when a bucket is reduced, and calls these
// methods.
//
// Threads: one at a time. Blocking: learn(), finish_early(), reduce_last() and settle_abandoned()
// wait until the group's deadline; launch_next() does if it reuses memory that is still being
// reduced. Lifetime: shares the parameters. Errors: those of the group. All ranks reduce the
// buckets in the same order, whatever the order in which a rank's gradients become ready.
//
// The calls of one pass, which is one reduction of all gradients:
//   begin_pass()       sets how gradients are weighted and combined
//   place()            called for each parameter with a gradient, when the gradient is final on
//                      this rank
//   place_unused()     called for each other parameter, when it is known to get no gradient
//   launch_next()      called for each bucket before the last one, when its parameters were placed
//   finish_early()     waits for the reductions of these buckets
//   reduce_last()      reduces the remaining buckets, the last of which has the trailer
//   settle_unused()    called for each parameter of place_unused(), if ranks differ
//   end_pass()         called when the reduction is done
// At any point abandon() may follow, if an exception ends the pass on this rank. It starts the
// remaining collectives, so that the other ranks do not wait for this rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

class CADRE_EXPORT GradientStorage {
 public:
  virtual ~GradientStorage() = default;
  GradientStorage(const GradientStorage&) = delete;
  GradientStorage& operator=(const GradientStorage&) = delete;

  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  // Returns the buckets in the order in which they are reduced.
  const BucketLayout& layout() const { return layout_; }
  size_t num_buckets() const { return layout_.buckets.size(); }
  size_t bucket_of(size_t parameter) const { return bucket_of_[parameter]; }
  // Returns whether the layout is final: learned in the first pass, or passed to the constructor.
  bool is_learned() const { return is_learned_; }
  // Arranges the buckets in the order in which gradients become ready. order: a permutation of the
  // parameters, the same on all ranks. Must be called between passes.
  virtual void learn(std::span<const int64_t> order) = 0;

  struct Combination {
    double factor = 1.0;           // this rank's gradients are multiplied by it
    ReduceOp op = ReduceOp::kAvg;  // reduces the products of all ranks
  };
  void begin_pass(const Combination& combination);
  virtual void place(size_t parameter) = 0;
  // Contributes zeros for this parameter. Its present gradient stays as it is, unless
  // settle_unused() changes it.
  virtual void place_unused(size_t parameter) = 0;
  // Returns the number of buckets whose reductions were launched in this pass.
  size_t num_launched() const { return num_launched_; }
  // Returns the number of buckets that are launched by launch_next(). reduce_last() reduces the
  // others.
  virtual size_t num_early_buckets() const = 0;
  // Returns how many of the early buckets are launched during the backward, each as soon as its
  // parameters have been placed. The other early buckets are launched at the end of the backward.
  virtual size_t num_eager_buckets() const { return num_early_buckets(); }
  virtual void launch_next() = 0;
  virtual bool is_last_launched() const = 0;
  // Returns the trailer, (trailer_numel) of a floating-point dtype on the CPU: elements with which
  // the reducer exchanges flags of the ranks. reduce_last() reduces it with Combination::op. It may
  // be written between finish_early() and reduce_last(), and read after reduce_last().
  virtual const at::Tensor& trailer() const = 0;
  virtual void finish_early() = 0;
  virtual void reduce_last() = 0;
  // used_by_some: whether any rank contributed a gradient. If not, the reduced zeros are dropped.
  struct Usage {
    bool used_by_some;
  };
  virtual void settle_unused(size_t parameter, const Usage& usage) = 0;
  virtual void end_pass() = 0;
  // Called if an exception ends the pass on this rank. Starts the remaining collectives of the
  // pass, because the other ranks wait for them, and does not wait for them itself. The pass then
  // fails on all ranks, so the values do not matter, except those of the trailer: if the trailer is
  // not launched yet, it must be written before.
  virtual void abandon() = 0;
  // Waits for the collectives that abandon() has started. Called before the next pass.
  virtual void settle_abandoned() = 0;

  // Called when a backward without reduction (no_sync()) has added to parameter.grad().
  virtual void keep_local(size_t parameter) = 0;
  // Drops accumulated gradients in parameter.grad() if the program has cleared the gradients of the
  // shards, which an optimizer sees instead. just_touched: the parameter to which the current
  // backward has added already.
  virtual void forget_cleared(std::optional<size_t> just_touched) = 0;
  // Clears the gradients of the shards, which an optimizer sees instead of parameter.grad().
  virtual void zero_grad(bool set_to_none) = 0;

 protected:
  // parameters: distinct leaves that require grad.
  explicit GradientStorage(std::vector<NamedTensor> parameters)
      : parameters_(std::move(parameters)), bucket_of_(parameters_.size()) {}

  void set_layout(BucketLayout layout);

  std::vector<NamedTensor> parameters_;
  Combination combination_;
  size_t num_launched_ = 0;
  bool is_learned_ = false;

 private:
  virtual void on_begin_pass() {}

  BucketLayout layout_;
  std::vector<size_t> bucket_of_;
};

// Writes gradient * factor to the target, in the target's dtype. Both have the same sizes; their
// strides may differ.
CADRE_EXPORT void write_gradient(const at::Tensor& target, const at::Tensor& gradient,
                                 double factor);

}  // namespace cadre
