// Keeps the gradients of a model while and after they are reduced over its ranks: the interface
// between the reducer, which decides when, and a placement of gradients.
//
// Threads: one at a time. Blocking: learn(), finish_early(), reduce_last() and settle_abandoned(),
// until the group's deadline; launch_next() if a placement reuses memory that is still being
// reduced. Lifetime: shares the parameters. Errors: cadre::Error of the group. Parameters are in
// buckets, and buckets are reduced in one order on all ranks, whatever the order in which a rank's
// gradients become ready.
//
// One pass, that is, one reduction of all gradients:
//   begin_pass()       how gradients are weighted and combined
//   place()            for each parameter with a gradient, when that is final on this rank;
//                      place_unused() for each of the others, when it is known that none will come
//   launch_next()      for each bucket before the last one, when its parameters have been placed
//   finish_early()     waits for these
//   reduce_last()      what is left, which carries the trailer
//   settle_unused()    if ranks differ, for each parameter of place_unused()
//   end_pass()         the reduction is done
// or, at any point, abandon(): this rank leaves the pass, and the other ranks must not wait for it.
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
  // Returns whether the layout is final.
  bool is_learned() const { return is_learned_; }
  // Brings the buckets into the order in which gradients become ready. `order` is a permutation of
  // the parameters, the same on all ranks. Called between passes.
  virtual void learn(std::span<const int64_t> order) = 0;

  struct Combination {
    double factor = 1.0;           // scales this rank's gradients
    ReduceOp op = ReduceOp::kAvg;  // combines the products of all ranks
  };
  void begin_pass(const Combination& combination);
  virtual void place(size_t parameter) = 0;
  // Contributes zeros. The gradient that the user sees stays, unless settle_unused() changes it.
  virtual void place_unused(size_t parameter) = 0;
  // Returns the number of buckets that were launched in this pass.
  size_t num_launched() const { return num_launched_; }
  // Returns the number of buckets that launch_next() launches; reduce_last() reduces the others.
  virtual size_t num_early_buckets() const = 0;
  // Returns the number of early buckets that are launched during backward, each when its parameters
  // have been placed.
  virtual size_t num_eager_buckets() const { return num_early_buckets(); }
  virtual void launch_next() = 0;
  virtual bool is_last_launched() const = 0;
  // Returns (trailer_numel) of a floating-point dtype, which reduce_last() reduces with the same
  // combination of ranks. Written and read between finish_early() and reduce_last(), and after
  // reduce_last().
  virtual const at::Tensor& trailer() const = 0;
  virtual void finish_early() = 0;
  virtual void reduce_last() = 0;
  // `used_by_some` says whether a rank contributed a gradient. Otherwise the reduced zeros are
  // dropped.
  struct Usage {
    bool used_by_some;
  };
  virtual void settle_unused(size_t parameter, const Usage& usage) = 0;
  virtual void end_pass() = 0;
  // Issues the operations for which the other ranks wait, and does not wait for their end. The pass
  // ends with an error on all ranks, so the values do not matter, except for those of a trailer
  // that is not launched yet.
  virtual void abandon() = 0;
  // Waits for the operations that are left of a pass which ended by an exception. Called before the
  // next pass.
  virtual void settle_abandoned() = 0;

  // Called when a backward without reduction has added to parameter.grad().
  virtual void keep_local(size_t parameter) = 0;
  // Drops gradients of keep_local() if the user has cleared the gradients that an optimizer sees
  // instead of them. `just_touched` is a parameter to which the running backward has already added.
  virtual void forget_cleared(std::optional<size_t> just_touched) = 0;
  // Clears the gradients that an optimizer sees instead of parameter.grad().
  virtual void zero_grad(bool set_to_none) = 0;

 protected:
  // `parameters` are distinct leaves that require grad.
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

// Writes `factor` times the gradient to the target, in the target's dtype and memory order. Both
// have the same sizes.
CADRE_EXPORT void write_gradient(const at::Tensor& target, const at::Tensor& gradient,
                                 double factor);

}  // namespace cadre
