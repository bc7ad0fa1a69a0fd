// What may be chosen about the reduction of gradients over replicas.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <optional>

#include "cadre/buckets/bucket_layout.h"
#include "cadre/wrap/sample_weight.h"

namespace cadre {

struct DataParallelOptions {
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Rank 0's buffers everywhere before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  BucketCaps bucket_caps;
  // Of an earlier run (learned_layout()), so that a resumed run has the same bits; without it the
  // layout is learned in the first step.
  std::optional<BucketLayout> layout;
};

}  // namespace cadre
