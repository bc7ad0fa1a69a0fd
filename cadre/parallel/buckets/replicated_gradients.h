// Stores whole gradients on every rank, as views of the flat buckets in which they are all_reduced.
//
// Threads: one at a time. Blocking: the constructor is a collective, because it allocates symmetric
// memory, and so is learn() if it changes the layout. Lifetime: a view keeps its bucket's memory
// alive, also after the destruction of this object. If the program holds a gradient that it has
// cleared from its parameter, this tensor keeps its values: it gets other memory when the next pass
// begins (handed_out_memory.h). Errors: kInvalidArgument for a layout of other parameters, or for a
// dtype that collectives do not support. The trailer is at the end of the last bucket, so that it
// needs no collective of its own. Source: c10d's gradient_as_bucket_view.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/buckets/comm_hook.h"
#include "cadre/parallel/buckets/gradient_storage.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

class CADRE_EXPORT ReplicatedGradients final : public GradientStorage {
 public:
  struct Options {
    BucketCaps caps;
    std::optional<BucketLayout> layout;  // if nullopt, it is learned in the first pass
    int64_t trailer_numel = 0;
    // Reduces the buckets in place of an all_reduce. The trailer is then a message of its own.
    std::shared_ptr<const CommHook> hook = {};
  };
  ReplicatedGradients(std::vector<NamedTensor> parameters, wrap::LocatedGroup group,
                      const Options& options);

  // Returns the buffer of a bucket: (n) elements, or (n + trailer_numel) for the last bucket.
  const at::Tensor& flat(size_t bucket) const { return buffers_.flats[bucket]; }
  // Returns what the communication hook keeps; null if there is no hook.
  CommHook::State* hook() const { return hook_.get(); }
  // Returns the view of a bucket that is the parameter's gradient. It has the sizes and, if the
  // parameter is dense, the strides of the parameter.
  const at::Tensor& view(size_t parameter) const { return buffers_.views[parameter]; }

  void learn(std::span<const int64_t> order) override;
  void place(size_t parameter) override;
  void place_unused(size_t parameter) override;
  size_t num_early_buckets() const override { return num_buckets() - 1; }
  void launch_next() override;
  bool is_last_launched() const override { return num_launched_ == num_buckets(); }
  const at::Tensor& trailer() const override { return buffers_.trailer; }
  void finish_early() override;
  void reduce_last() override;
  void settle_unused(size_t parameter, const Usage& usage) override;
  void end_pass() override {}
  void abandon() override;
  void settle_abandoned() override { finish_early(); }
  void keep_local(size_t) override {}
  void forget_cleared(std::optional<size_t>) override {}
  void zero_grad(bool) override {}

 private:
  struct Buffers {
    std::vector<at::Tensor> flats;  // one flat buffer for each bucket
    std::vector<at::Tensor> views;  // the gradient of each parameter
    at::Tensor trailer;  // the last elements of the last bucket, or a tensor of its own on the CPU
  };

  void on_begin_pass() override;
  Buffers allocate(const BucketLayout& layout);
  std::optional<Buffers> allocate_together(const BucketLayout& layout);
  // Returns whether the program still holds a gradient in this bucket that it has cleared from its
  // parameter, or an alias of it.
  bool is_handed_out(size_t bucket) const;
  bool is_in_use(size_t parameter) const;
  void take_back(size_t bucket);

  // The trailer of buckets on a device is a message of its own, on the CPU: the host writes and
  // reads it, and must not wait for the device for that. A hook may round what is in a bucket.
  bool is_trailer_in_bucket() const { return device_.is_cpu() && hook_ == nullptr; }
  // Starts the hook for the bucket. Aborts the group if it throws, because the other ranks wait for
  // messages of which only the hook knows.
  std::function<void()> start_hook(size_t bucket);
  void abort_after(const std::exception_ptr& failure) const;
  // Returns the factor with which this rank's gradients are written into the buckets.
  double weight() const;

  wrap::LocatedGroup group_;
  const c10::Device device_;  // all parameters are on it
  BucketCaps caps_;
  int64_t trailer_numel_;
  std::string hook_name_;
  std::unique_ptr<CommHook::State> hook_;  // null if buckets are all_reduced
  Buffers buffers_;
  std::vector<std::function<void()>> waits_;
  // untouched_[parameter] is a copy of a gradient to which no backward of this rank has added in
  // this pass. The list is empty if there is none.
  std::vector<at::Tensor> untouched_;
};

}  // namespace cadre
