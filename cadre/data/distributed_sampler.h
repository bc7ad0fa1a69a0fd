// Which samples a rank sees in an epoch, in the order of Python's DistributedSampler, bit for bit.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument for a rank out of range.
// Source: torch.utils.data.DistributedSampler: a permutation from a generator seeded with
// seed + epoch; padded by repetition to a multiple of the ranks, or cut to one; rank r takes every
// world_size-th index from the r-th.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/base/types.h"

namespace cadre {

struct DistributedSamplerOptions {
  int64_t num_samples = 0;
  Rank rank = 0;
  int world_size = 1;
  int64_t seed = 0;
  bool shuffle = true;
  bool drop_last = false;  // cut the tail that does not divide, instead of repeating samples
};

class CADRE_EXPORT DistributedSampler {
 public:
  explicit DistributedSampler(const DistributedSamplerOptions& options);

  // Samples of each rank; equal on all ranks.
  int64_t num_samples_per_rank() const;
  // This rank's samples in order; num_samples_per_rank() of them.
  std::vector<int64_t> indices(int64_t epoch) const;

 private:
  DistributedSamplerOptions options_;
};

// The order of all ranks' samples together: torch.randperm(num_samples) of a generator seeded with
// `seed`.
CADRE_EXPORT std::vector<int64_t> seeded_permutation(int64_t num_samples, int64_t seed);

}  // namespace cadre
