// What may be chosen about DistributedDataParallel.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <optional>

#include "cadre/buckets/bucket_layout.h"

namespace cadre {

enum class GradientWeighting {
  // Every rank's gradient counts the same, whatever the sizes of the batches.
  kEqual,
  // Every rank's gradient counts by the samples it is the mean of, so the result is the mean over
  // all samples; a rank without any contributes zeros, and still runs its backward. A forward has
  // as many samples as its first tensor has rows (size(0)), unless set_num_samples() says
  // how many.
  // Costs one message of 128 bytes before each synchronized backward.
  kSamples,
};

struct DistributedDataParallelOptions {
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Rank 0's buffers everywhere before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  BucketCaps bucket_caps;
  // Of an earlier run (learned_layout()), so that a resumed run has the same bits; without it the
  // layout is learned in the first step.
  std::optional<BucketLayout> layout;
};

}  // namespace cadre
