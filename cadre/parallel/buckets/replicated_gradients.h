// Gradients that every rank keeps: they are views of the flat buffers in which they are reduced.
//
// Threads: one at a time. Blocking: the constructor is collective (it allocates symmetric memory),
// and so is learn() when it changes the layout.
// Lifetime: a view keeps its bucket's memory alive, also after the ReplicatedGradients is gone. If
// the program still holds a gradient after it has cleared the gradients of the parameters, that
// gradient keeps its values: it gets memory of its own when the next pass begins
// (handed_out_memory.h).
// Errors: kInvalidArgument for a layout that does not fit the parameters, or a parameter whose
// dtype no group moves. The last bucket has more elements, the trailer, so that it costs no message
// of its own. Source: c10d's gradient_as_bucket_view.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/buckets/bucket_layout.h"
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
  };
  ReplicatedGradients(std::vector<NamedTensor> parameters, wrap::LocatedGroup group,
                      const Options& options);

  // Returns the elements that are reduced together: (n), or (n + trailer_numel) for the last
  // bucket.
  const at::Tensor& flat(size_t bucket) const { return buffers_.flats[bucket]; }
  // Returns the gradient of a parameter, with the parameter's sizes and, if it is dense, its
  // strides.
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
    std::vector<at::Tensor> flats;  // has one flat tensor for each bucket
    std::vector<at::Tensor> views;  // has one view for each parameter
    at::Tensor trailer;             // the last elements of the last bucket
  };

  void on_begin_pass() override;
  Buffers allocate(const BucketLayout& layout);
  // Returns whether the program still holds memory of a gradient that it has removed from its
  // parameter.
  bool is_handed_out(size_t bucket) const;
  bool is_in_use(size_t parameter) const;
  void take_back(size_t bucket);

  wrap::LocatedGroup group_;
  BucketCaps caps_;
  int64_t trailer_numel_;
  Buffers buffers_;
  std::vector<std::function<void()>> waits_;
  // Has one entry for each parameter: a copy of the gradient if this rank did not change it. Empty
  // if there are none.
  std::vector<at::Tensor> untouched_;
};

}  // namespace cadre
