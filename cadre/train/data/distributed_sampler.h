// The samples of one rank in an epoch, in exactly the order of Python's DistributedSampler.
//
// Threads: plain values. Errors: kInvalidArgument for a rank out of range, and for a number of
// samples that is negative or above 2^48. Source: torch.utils.data.DistributedSampler. A
// permutation from a generator that is seeded with seed + epoch is padded by repetition, or
// truncated, to a multiple of the world size; rank r takes the r-th index and every world_size-th
// after it. Guide: docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct DistributedSamplerOptions {
  int64_t num_samples = 0;
  int rank = 0;
  int world_size = 1;
  int64_t seed = 0;
  bool shuffle = true;
  // If true, samples at the end are dropped instead of padding the list with repeated samples.
  bool drop_last = false;
};

class CADRE_EXPORT DistributedSampler {
 public:
  explicit DistributedSampler(const DistributedSamplerOptions& options);

  // Returns the number of samples of each rank, which is the same for all ranks.
  int64_t num_samples_per_rank() const;
  // Returns this rank's num_samples_per_rank() samples, in order.
  std::vector<int64_t> indices(int64_t epoch) const;

 private:
  DistributedSamplerOptions options_;
};

// Returns torch.randperm(num_samples) of a generator that is seeded with `seed`: the order of the
// samples of all ranks together.
CADRE_EXPORT std::vector<int64_t> seeded_permutation(int64_t num_samples, int64_t seed);

// Returns seed + epoch, modulo 2^64: the seed of the epoch's permutation.
CADRE_EXPORT int64_t seed_of_epoch(int64_t seed, int64_t epoch);

}  // namespace cadre
