// Defines the options of DistributedDataParallel.
//
// All ranks must pass the same options.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/reduction/agreement/gradient_weighting.h"

namespace cadre {

class CommHook;

enum class GradientPlacement : uint8_t {
  kReplicated,  // every rank has whole gradients, in parameter.grad()
  // Each rank has only the gradients of its shards, in the grad() of parameter_shards(). Any access
  // to parameter.grad() after backward() throws. This is ZeRO stage 2.
  kSharded,
};

struct DistributedDataParallelOptions {
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Whether rank 0's buffers are broadcast before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  BucketCaps bucket_caps = {};
  // The learned_layout() of an earlier run, with which a resumed run gives the same bits. Default:
  // the layout is learned in the first step.
  std::optional<BucketLayout> layout = {};
  GradientPlacement gradients = GradientPlacement::kReplicated;
  // How the ranks add the gradients of a bucket, for example comm_hooks::bf16_compress(). Default:
  // by an all_reduce in the gradients' dtype. Not for GradientPlacement::kSharded.
  std::shared_ptr<const CommHook> comm_hook = {};
};

}  // namespace cadre
