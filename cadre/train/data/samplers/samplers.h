// Orders of a dataset for a DataLoader: a shuffle in constant memory, draws by weight, and samples
// of similar length side by side.
//
//   cadre::DataLoader loader(dataset, {.batch_size = 64, .ranks = world,
//                                      .sampler = std::make_shared<cadre::KeyedSampler>(
//                                          dataset->size(), /*seed=*/0)});
//
// All are functions of (seed, epoch, position), and so independent of the number of ranks; a loader
// continues with them from any position on any number of ranks.
//
// Threads: all methods are const and may be called from any thread. Blocking: order() of all but
// KeyedSampler computes the order of a whole epoch. Errors: kInvalidArgument. Guide:
// docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/train/data/samplers/sampler.h"

namespace cadre {

// Every sample once, in the order of a KeyedPermutation: an epoch over 10^12 samples takes no
// memory. Use it for datasets whose permutation would not fit into memory.
class CADRE_EXPORT KeyedSampler : public Sampler {
 public:
  KeyedSampler(int64_t num_samples, int64_t seed);

  int64_t size() const override { return num_samples_; }
  EpochOrder order(int64_t epoch) const override;
  uint64_t digest() const override;

 private:
  int64_t num_samples_;
  int64_t seed_;
};

struct WeightedRandomSamplerOptions {
  // The number of draws of an epoch. Default: the number of weights.
  std::optional<int64_t> num_samples = {};
  bool replacement = true;  // if false, no sample is drawn twice in an epoch
  int64_t seed = 0;
};

// Draws samples with probabilities in proportion to their weights. The draws of epoch e are those
// of torch.utils.data.WeightedRandomSampler with a generator that is seeded with seed + e.
class CADRE_EXPORT WeightedRandomSampler : public Sampler {
 public:
  // weights: one for each sample, finite, 0 or above, at most 2^24 of them, not all 0. Without
  // replacement at least num_samples of them are above 0.
  WeightedRandomSampler(std::vector<double> weights, const WeightedRandomSamplerOptions& options);

  int64_t size() const override { return num_draws_; }
  EpochOrder order(int64_t epoch) const override;
  uint64_t digest() const override;

 private:
  std::vector<double> weights_;
  WeightedRandomSamplerOptions options_;
  int64_t num_draws_;
};

struct LengthGroupedSamplerOptions {
  int64_t batch_size = 1;  // the loader's: the samples of all ranks together
  // The number of batches within which samples are sorted. Default: a quarter of the batches of an
  // epoch, from 1 to 50.
  std::optional<int64_t> num_sorted_batches = {};
  int64_t seed = 0;
};

// Every sample once, in an order in which the samples of a batch have similar lengths, so that
// little is padded: a shuffled epoch is divided into blocks of num_sorted_batches batches, and each
// is sorted by length, the longest first. The first sample of an epoch is the longest of all, so
// that memory that does not suffice is noticed at once. Source: LengthGroupedSampler of Hugging
// Face's transformers.
class CADRE_EXPORT LengthGroupedSampler : public Sampler {
 public:
  // lengths: one for each sample, 0 or above.
  LengthGroupedSampler(std::vector<int64_t> lengths, const LengthGroupedSamplerOptions& options);

  int64_t size() const override { return static_cast<int64_t>(lengths_.size()); }
  EpochOrder order(int64_t epoch) const override;
  uint64_t digest() const override;

 private:
  std::vector<int64_t> lengths_;
  int64_t block_size_ = 1;  // the number of samples that are sorted together
  int64_t seed_;
};

}  // namespace cadre
