#include "cadre/data/data_loader.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/data/distributed_sampler.h"
#include "cadre/data/prefetcher.h"
#include "cadre/os/system.h"

namespace cadre {
namespace {

constexpr int kMaxThreads = 256;

// What each rank sends when a loader is constructed. The mark tells it from the numbers that a rank
// sends in another all_gather of this size.
constexpr int64_t kMark = 0x63616472656c6f61;  // "cadreloa"
using LoaderCall = std::array<int64_t, 7>;
constexpr std::array<const char*, 7> kLoaderCallFields = {
    "", "batch_size", "seed", "shuffle", "drop_last", "split", "dataset size"};

// Throws the same error on all ranks unless every rank has the same order of samples and the same
// batches.
void check_equal_on_all_ranks(const ProcessGroup& group, const LoaderCall& own) {
  Communicator& communicator = group.communicator();
  std::vector<LoaderCall> calls(static_cast<size_t>(group.world_size()));
  communicator.all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(calls)),
                          DType::kInt64, {.call = "DataLoader"});
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    const auto [first, other] = std::ranges::mismatch(calls.front(), calls[rank]);
    if (first == calls.front().end()) continue;
    if (first == calls.front().begin()) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("DataLoader on group \"{}\": rank 0 and rank {} are in different "
                                "operations; construct the loader on all ranks of its group, in "
                                "the same order as other collectives",
                                group.name(), rank));
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader on group \"{}\": {} is {} on rank 0 and {} on rank {}; all ranks "
                      "need the same batch_size, seed, shuffle, drop_last, split and dataset",
                      group.name(),
                      kLoaderCallFields[static_cast<size_t>(first - calls.front().begin())], *first,
                      *other, rank));
  }
}

void check_options(const DataLoaderOptions& options, int64_t num_samples, int64_t world_size) {
  if (options.batch_size < world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: batch_size is {}, the samples of all {} ranks together; "
                              "expected at least one sample for each rank",
                              options.batch_size, world_size));
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads || options.prefetch < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: num_threads is {} and prefetch {}; expected 0 to {} "
                              "threads, and a prefetch of at least 1 batch",
                              options.num_threads, options.prefetch, kMaxThreads));
  }
  if (num_samples == 0 || (options.drop_last && num_samples < options.batch_size)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the dataset has {} samples, which give no batch of {}; "
                              "use a smaller batch_size, or more samples",
                              num_samples, options.batch_size));
  }
}

}  // namespace

struct DataLoader::Prefetch {
  Prefetch(int64_t num_batches, std::function<Batch(int64_t)> fetch,
           const DataLoaderOptions& options)
      : batches(*system, num_batches, std::move(fetch),
                {.num_threads = options.num_threads,
                 .depth = options.prefetch * options.num_threads,
                 .timeout = options.timeout}) {}

  std::unique_ptr<os::System> system = os::make_native_system();
  Prefetcher<Batch> batches;
};

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() = default;

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
  options_.group.reset();
  const int64_t num_samples = dataset_->size();
  share_.split = options.split;
  share_.batch_size = options.batch_size;
  if (options.group) {
    share_.rank = options.group->rank();
    share_.world_size = options.group->world_size();
  }
  // Compared before they are checked: then all ranks check the same values and refuse them alike.
  if (share_.world_size > 1) {
    check_equal_on_all_ranks(*options.group, {kMark, options.batch_size, options.seed,
                                              static_cast<int64_t>(options.shuffle),
                                              static_cast<int64_t>(options.drop_last),
                                              static_cast<int64_t>(options.split), num_samples});
  }
  check_options(options, num_samples, share_.world_size);
}

int64_t DataLoader::batches_per_epoch() const {
  const int64_t full = dataset_->size() / options_.batch_size;
  const bool has_rest = dataset_->size() % options_.batch_size != 0;
  return full + (has_rest && !options_.drop_last ? 1 : 0);
}

DataLoader::Epoch DataLoader::epoch(int64_t epoch) {
  if (!is_positioned_ || position_.epoch != epoch) position_ = {.epoch = epoch, .samples = 0};
  is_positioned_ = false;
  prefetch_.reset();
  return Epoch(this);
}

void DataLoader::seek(const LoaderPosition& position) {
  if (position.epoch < 0 || position.samples < 0 || position.samples > dataset_->size()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader: cannot seek to sample {} of epoch {}; expected a sample in "
                      "[0, {}] of an epoch from 0",
                      position.samples, position.epoch, dataset_->size()));
  }
  position_ = position;
  is_positioned_ = true;
  prefetch_.reset();
}

DataLoader::Epoch::Iterator& DataLoader::Epoch::Iterator::operator++() {
  is_at_end_ = !loader_->next(batch_);
  return *this;
}

bool DataLoader::next(Batch& batch) {
  const int64_t begin = position_.samples;
  const int64_t end = std::min(begin + options_.batch_size, dataset_->size());
  if (begin == end || (options_.drop_last && end - begin < options_.batch_size)) {
    prefetch_.reset();
    return false;
  }
  make_order();
  batch = fetch(begin);
  position_.samples = end;
  return true;
}

void DataLoader::make_order() {
  if (order_epoch_ == position_.epoch) return;
  auto order = std::make_shared<std::vector<int64_t>>();
  if (options_.shuffle) {
    *order = seeded_permutation(dataset_->size(), options_.seed + position_.epoch);
  } else {
    order->resize(static_cast<size_t>(dataset_->size()));
    std::iota(order->begin(), order->end(), int64_t{0});
  }
  order_ = std::move(order);
  order_epoch_ = position_.epoch;
}

std::vector<int64_t> DataLoader::samples_of(const Share& share, const std::vector<int64_t>& order,
                                            int64_t begin) {
  const auto end = std::min(begin + share.batch_size, static_cast<int64_t>(order.size()));
  if (share.split == BatchSplit::kConsecutive) {
    const int64_t count = end - begin;
    const auto first = order.begin() + begin;
    return {first + count * share.rank / share.world_size,
            first + count * (share.rank + 1) / share.world_size};
  }
  // The first index from `begin` on that is congruent to the rank.
  int64_t index =
      begin + (share.rank - begin % share.world_size + share.world_size) % share.world_size;
  std::vector<int64_t> samples;
  for (; index < end; index += share.world_size) {
    samples.push_back(order[static_cast<size_t>(index)]);
  }
  return samples;
}

Batch DataLoader::fetch(int64_t begin) {
  if (options_.num_threads == 0) return dataset_->get(samples_of(share_, *order_, begin));
  if (!prefetch_) {
    const int64_t size = dataset_->size() - begin;
    const int64_t num_batches = options_.drop_last
                                    ? size / options_.batch_size
                                    : (size + options_.batch_size - 1) / options_.batch_size;
    prefetch_ = std::make_unique<Prefetch>(
        num_batches,
        [dataset = dataset_, order = order_, share = share_, begin](int64_t index) {
          return dataset->get(samples_of(share, *order, begin + index * share.batch_size));
        },
        options_);
  }
  try {
    return prefetch_->batches.next();
  } catch (...) {
    prefetch_.reset();  // the next request fetches the batch again
    throw;
  }
}

}  // namespace cadre
