// Options of DistributedDataParallel.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/reduction/agreement/gradient_weighting.h"

namespace cadre {

enum class GradientPlacement : uint8_t {
  kReplicated,  // every rank has every gradient, in parameter.grad()
  // Each gradient is reduced to the ranks that own a part of the parameter, in parameter_shards().
  // Any access to parameter.grad() after backward() throws. This is stage 2 of ZeRO.
  kSharded,
};

struct DistributedDataParallelOptions {
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Copies rank 0's buffers to all ranks before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  BucketCaps bucket_caps;
  // The learned_layout() of an earlier run, so that a resumed run has the same bits. Without it the
  // layout is learned in the first step.
  std::optional<BucketLayout> layout;
  GradientPlacement gradients = GradientPlacement::kReplicated;
};

}  // namespace cadre
