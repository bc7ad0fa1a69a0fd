// What may be chosen about DistributedDataParallel.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <optional>

#include "cadre/buckets/bucket_layout.h"

namespace cadre {

enum class GradientWeighting {
  // Every rank's gradient counts the same: right when all ranks have batches of one size.
  kEqual,
  // Every rank's gradient counts by the samples it is the mean of, so the result is the mean over
  // all samples. Each forward with grad must be preceded by set_num_samples(), on every rank; a
  // rank that has none says 0 and still runs its backward.
  kSamples,
};

struct DistributedDataParallelOptions {
  GradientWeighting weighting = GradientWeighting::kEqual;
  // Rank 0's buffers everywhere before each synchronized forward in training mode.
  bool broadcast_buffers = true;
  BucketCaps bucket_caps;
  // Of an earlier run (learned_layout()), so that a resumed run has the same bits; without it the
  // layout is learned in the first step.
  std::optional<BucketLayout> layout;
};

}  // namespace cadre
