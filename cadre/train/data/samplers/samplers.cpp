#include "cadre/train/data/samplers/samplers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/distributed_sampler.h"
#include "cadre/train/data/samplers/keyed_permutation.h"

namespace cadre {
namespace {

constexpr int64_t kMaxWeights = int64_t{1} << 24;  // the limit of at::multinomial
constexpr int64_t kMaxDraws = int64_t{1} << 48;    // a larger number could overflow a sum of sizes

EpochOrder order_of(std::vector<int64_t> samples) {
  return [samples = std::move(samples)](int64_t position) {
    return samples[static_cast<size_t>(position)];
  };
}

void check_weight(double weight, size_t index) {
  if (std::isfinite(weight) && weight >= 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("WeightedRandomSampler: the weight of sample {} is {}; expected a "
                            "finite number of 0 or above",
                            index, weight));
}

}  // namespace

KeyedSampler::KeyedSampler(int64_t num_samples, int64_t seed)
    : num_samples_(num_samples), seed_(seed) {
  (void)order(0);  // refuses a number of samples below 0
}

EpochOrder KeyedSampler::order(int64_t epoch) const {
  Random keys = keyed_random(static_cast<uint64_t>(seed_), static_cast<uint64_t>(epoch), 0);
  return KeyedPermutation(num_samples_, keys.next());
}

uint64_t KeyedSampler::digest() const {
  Fnv1a hash;
  hash.add("KeyedSampler");
  hash.add(static_cast<uint64_t>(num_samples_));
  hash.add(static_cast<uint64_t>(seed_));
  return hash.value();
}

WeightedRandomSampler::WeightedRandomSampler(std::vector<double> weights,
                                             const WeightedRandomSamplerOptions& options)
    : weights_(std::move(weights)),
      options_(options),
      num_draws_(options.num_samples.value_or(std::ssize(weights_))) {
  double total = 0;
  int64_t num_positive = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    check_weight(weights_[i], i);
    total += weights_[i];
    if (weights_[i] > 0) ++num_positive;
  }
  const int64_t most = options.replacement ? kMaxDraws : num_positive;
  if (std::ssize(weights_) > kMaxWeights || !std::isfinite(total) || num_positive == 0 ||
      num_draws_ < 1 || num_draws_ > most) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("WeightedRandomSampler: {} draws {} replacement from {} weights, of "
                              "which {} are above 0, with a sum of {}; expected 1 to {} draws, 1 "
                              "to {} weights, and a finite sum above 0",
                              num_draws_, options.replacement ? "with" : "without", weights_.size(),
                              num_positive, total, most, kMaxWeights));
  }
}

EpochOrder WeightedRandomSampler::order(int64_t epoch) const {
  const at::Tensor weights = at::empty({std::ssize(weights_)}, at::kDouble);
  std::ranges::copy(weights_, weights.mutable_data_ptr<double>());
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      static_cast<uint64_t>(seed_of_epoch(options_.seed, epoch)));
  const at::Tensor draws = at::multinomial(weights, num_draws_, options_.replacement, generator);
  const auto* first = draws.const_data_ptr<int64_t>();
  return order_of({first, first + num_draws_});
}

uint64_t WeightedRandomSampler::digest() const {
  Fnv1a hash;
  hash.add("WeightedRandomSampler");
  for (const int64_t part : {num_draws_, int64_t{options_.replacement}, options_.seed}) {
    hash.add(static_cast<uint64_t>(part));
  }
  for (const double weight : weights_) hash.add(std::bit_cast<uint64_t>(weight));
  return hash.value();
}

LengthGroupedSampler::LengthGroupedSampler(std::vector<int64_t> lengths,
                                           const LengthGroupedSamplerOptions& options)
    : lengths_(std::move(lengths)), seed_(options.seed) {
  constexpr int64_t kMostSortedBatches = 50;
  const auto negative = std::ranges::find_if(lengths_, [](int64_t length) { return length < 0; });
  if (options.batch_size < 1 || options.batch_size > kMaxDraws ||
      options.num_sorted_batches.value_or(1) < 1 || negative != lengths_.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("LengthGroupedSampler: a batch_size of {}, {} sorted batches, and a "
                              "shortest length of {}; expected at least 1 sample and 1 batch, and "
                              "lengths of 0 or above",
                              options.batch_size, options.num_sorted_batches.value_or(1),
                              lengths_.empty() ? 0 : std::ranges::min(lengths_)));
  }
  const int64_t quarter = size() / (options.batch_size * 4);
  const int64_t num_batches =
      options.num_sorted_batches.value_or(std::clamp<int64_t>(quarter, 1, kMostSortedBatches));
  // Not more than all samples, so that the product cannot overflow.
  block_size_ = std::min(num_batches, size() / options.batch_size + 1) * options.batch_size;
}

EpochOrder LengthGroupedSampler::order(int64_t epoch) const {
  std::vector<int64_t> samples = seeded_permutation(size(), seed_of_epoch(seed_, epoch));
  const auto length_of = [&](int64_t sample) { return lengths_[static_cast<size_t>(sample)]; };
  int64_t longest = 0;  // the position of the first sample of the block with the longest sample
  for (int64_t begin = 0; begin < size(); begin += block_size_) {
    const auto first = samples.begin() + begin;
    std::ranges::stable_sort(first, samples.begin() + std::min(begin + block_size_, size()),
                             std::ranges::greater(), length_of);
    if (length_of(*first) > length_of(samples[static_cast<size_t>(longest)])) longest = begin;
  }
  if (!samples.empty()) std::swap(samples.front(), samples[static_cast<size_t>(longest)]);
  return order_of(std::move(samples));
}

uint64_t LengthGroupedSampler::digest() const {
  Fnv1a hash;
  hash.add("LengthGroupedSampler");
  hash.add(static_cast<uint64_t>(block_size_));
  hash.add(static_cast<uint64_t>(seed_));
  for (const int64_t length : lengths_) hash.add(static_cast<uint64_t>(length));
  return hash.value();
}

}  // namespace cadre
