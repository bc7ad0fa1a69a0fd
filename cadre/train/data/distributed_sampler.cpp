#include "cadre/train/data/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <numeric>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr int64_t kMaxSamples = int64_t{1} << 48;  // a larger number could overflow a sum of sizes

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Repeats the list until it has `total` indices. Python's sampler has two code paths for this, with
// the same result.
void pad_by_repetition(std::vector<int64_t>& indices, size_t total) {
  const size_t num_samples = indices.size();
  while (indices.size() < total) indices.push_back(indices[indices.size() % num_samples]);
}

}  // namespace

DistributedSampler::DistributedSampler(const DistributedSamplerOptions& options)
    : options_(options) {
  if (options.num_samples < 0 || options.num_samples > kMaxSamples || options.world_size < 1 ||
      options.rank < 0 || options.rank >= options.world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DistributedSampler: rank {} of {} over {} samples; expected a rank "
                              "in [0, world_size) and a number of samples in [0, {}]",
                              options.rank, options.world_size, options.num_samples, kMaxSamples));
  }
}

int64_t DistributedSampler::num_samples_per_rank() const {
  const int64_t world_size = options_.world_size;
  if (options_.drop_last && options_.num_samples % world_size != 0) {
    // The formula of Python's sampler. With fewer samples than ranks its ceil gives 0, not -1.
    return ceil_divide(std::max<int64_t>(options_.num_samples - world_size, 0), world_size);
  }
  return ceil_divide(options_.num_samples, world_size);
}

std::vector<int64_t> DistributedSampler::indices(int64_t epoch) const {
  std::vector<int64_t> all(static_cast<size_t>(options_.num_samples));
  if (options_.shuffle) {
    all = seeded_permutation(options_.num_samples, seed_of_epoch(options_.seed, epoch));
  } else {
    std::iota(all.begin(), all.end(), int64_t{0});
  }
  const auto total = static_cast<size_t>(num_samples_per_rank() * options_.world_size);
  if (all.empty()) return {};
  if (options_.drop_last) {
    all.resize(std::min(all.size(), total));
  } else {
    pad_by_repetition(all, total);
  }
  std::vector<int64_t> own;
  for (size_t i = static_cast<size_t>(options_.rank); i < all.size();
       i += static_cast<size_t>(options_.world_size)) {
    own.push_back(all[i]);
  }
  return own;
}

std::vector<int64_t> seeded_permutation(int64_t num_samples, int64_t seed) {
  if (num_samples < 0 || num_samples > kMaxSamples) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("seeded_permutation: {} samples; expected a number in [0, {}]",
                              num_samples, kMaxSamples));
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  const at::Tensor order = at::randperm(num_samples, generator, at::TensorOptions(at::kLong));
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + num_samples};
}

int64_t seed_of_epoch(int64_t seed, int64_t epoch) {
  return static_cast<int64_t>(static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch));
}

}  // namespace cadre
