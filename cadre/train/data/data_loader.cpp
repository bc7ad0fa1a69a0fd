#include "cadre/train/data/data_loader.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/train/data/batches/fetched_batch.h"
#include "cadre/train/data/distributed_sampler.h"

namespace cadre {
namespace {

constexpr std::string_view kSameOnAllRanks =
    "all ranks need the same batch_size, seed, shuffle, drop_last, split, sampler and dataset";

int64_t size_of(const Dataset* dataset) {
  if (dataset == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "DataLoader: the dataset is null");
  }
  const int64_t num_samples = dataset->size();
  if (num_samples < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader: the dataset's size() is {}; expected 0 or more", num_samples));
  }
  return num_samples;
}

// Throws unless the sampler, if there is one, decides alone about the order.
int64_t epoch_size_of(const DataLoaderOptions& options, int64_t num_samples) {
  if (options.sampler == nullptr) return num_samples;
  const int64_t size = options.sampler->size();
  if (options.seed != 0 || size < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the seed is {} beside a sampler of {} positions; a "
                              "sampler has a seed of its own, so leave out .seed, and expected 0 "
                              "or more positions",
                              options.seed, size));
  }
  return size;
}

// Returns everything that decides which samples a batch has.
std::vector<AgreedField> fields_of(const DataLoaderOptions& options, const Dataset& dataset,
                                   int64_t num_samples) {
  const auto number = [](auto value) { return cadre::format("{}", static_cast<int64_t>(value)); };
  const std::optional<uint64_t> digest = dataset.digest();
  return {{"batch_size", number(options.batch_size)},
          {"seed", number(options.seed)},
          {"shuffle", number(options.shuffle)},
          {"drop_last", number(options.drop_last)},
          {"split", number(options.split)},
          {"sampler digest",
           options.sampler ? cadre::format("{:016x}", options.sampler->digest()) : "none"},
          {"dataset size", number(num_samples)},
          {"dataset digest", digest ? cadre::format("{:016x}", *digest) : "none"}};
}

void check_options(const DataLoaderOptions& options, int64_t num_samples, int64_t world_size) {
  if (options.batch_size < world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: batch_size is {}, the samples of all {} ranks together; "
                              "expected at least one sample for each rank",
                              options.batch_size, world_size));
  }
  if (num_samples == 0 || (options.drop_last && num_samples < options.batch_size)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the dataset has {} samples, which give no batch of {}; "
                              "use a smaller batch_size, or more samples",
                              num_samples, options.batch_size));
  }
}

// Returns the sample at a position of the epoch.
int64_t sample_at(const EpochOrder& order, int64_t position, int64_t num_samples) {
  const int64_t sample = order(position);
  if (sample >= 0 && sample < num_samples) return sample;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("DataLoader: the sampler returned sample {} for position {}; expected "
                            "a sample in [0, {})",
                            sample, position, num_samples));
}

// Returns the rank's part of the batch that has the positions [begin, end) of the epoch.
Batch fetched_part(const Dataset& dataset, const EpochOrder& order, const data::BatchShare& share,
                   const std::pair<int64_t, int64_t>& positions, int64_t num_samples) {
  std::vector<int64_t> samples = data::positions_of(share, positions.first, positions.second);
  for (int64_t& each : samples) each = sample_at(order, each, num_samples);
  return checked_batch("DataLoader: Dataset::get", dataset.get(samples), samples.size());
}

}  // namespace

struct DataLoader::Prefetch : ThreadedFetch<Batch> {
  using ThreadedFetch::ThreadedFetch;
};

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() = default;

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options)
    : dataset_(std::move(dataset)), options_(options), clock_(os::make_native_system()) {
  options_.ranks.reset();
  const ProcessGroup* group = nullptr;
  share_.split = options.split;
  share_.batch_size = options.batch_size;
  if (options.ranks) {
    group = &options.ranks->group_of_one_axis("DataLoader", "dp");
    share_.rank = group->rank();
    share_.world_size = group->world_size();
  }
  const auto read = [&] {
    check_fetch_threads("DataLoader", options.num_threads, options.prefetch);
    num_samples_ = size_of(dataset_.get());
    epoch_size_ = epoch_size_of(options, num_samples_);
    options_.pin_memory = options.pin_memory && device::uses_pinned_memory();
  };
  if (share_.world_size == 1) {
    read();
  } else {
    check_equal_on_all_ranks(
        *group, "DataLoader",
        [&] {
          read();
          return fields_of(options, *dataset_, num_samples_);
        },
        kSameOnAllRanks);
  }
  // All ranks check the same values, so either every rank throws or none does.
  check_options(options, epoch_size_, share_.world_size);
}

const Dataset& DataLoader::dataset() const {
  if (dataset_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "DataLoader: this loader was moved from; use the one that it was moved into");
  }
  return *dataset_;
}

int64_t DataLoader::batches_per_epoch() const {
  (void)dataset();
  const int64_t full = epoch_size_ / options_.batch_size;
  const bool has_rest = epoch_size_ % options_.batch_size != 0;
  return full + (has_rest && !options_.drop_last ? 1 : 0);
}

DataLoader::Epoch DataLoader::epoch(int64_t epoch) {
  (void)dataset();
  if (epoch < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the epoch is {}; expected 0 or more", epoch));
  }
  if (!is_positioned_ || position_.epoch != epoch) position_ = {.epoch = epoch, .samples = 0};
  is_positioned_ = false;
  end_loops();
  return Epoch(this, loops_.begin_epoch());
}

void DataLoader::end_loops() {
  (void)loops_.begin_epoch();
  prefetch_.reset();
}

std::shared_ptr<const data::LoopToken> DataLoader::begin_loop(
    const std::shared_ptr<const data::LoopToken>& epoch) {
  (void)dataset();
  return loops_.begin_loop(epoch);
}

void DataLoader::seek(const LoaderPosition& position) {
  (void)dataset();
  if (position.epoch < 0 || position.samples < 0 || position.samples > epoch_size_) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader: cannot seek to sample {} of epoch {}; expected a sample in "
                      "[0, {}] of an epoch from 0",
                      position.samples, position.epoch, epoch_size_));
  }
  position_ = position;
  is_positioned_ = true;
  end_loops();
}

bool DataLoader::next(Batch& batch, const std::shared_ptr<const data::LoopToken>& loop) {
  if (const int64_t now = dataset().size(); now != num_samples_) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the dataset had {} samples when the loader was made and "
                              "has {} now; make another loader, on all ranks",
                              num_samples_, now));
  }
  loops_.check(loop);
  const int64_t begin = position_.samples;
  const int64_t end = begin + std::min(options_.batch_size, epoch_size_ - begin);
  if (begin == end || (options_.drop_last && end - begin < options_.batch_size)) {
    prefetch_.reset();
    return false;
  }
  const TimePoint requested = clock_->now();
  make_order();
  batch = fetch(begin);
  data_wait_ += clock_->now() - requested;
  position_.samples = end;
  return true;
}

void DataLoader::make_order() {
  if (order_epoch_ == position_.epoch) return;
  EpochOrder order = [](int64_t position) { return position; };
  if (options_.sampler) {
    order = options_.sampler->order(position_.epoch);
  } else if (options_.shuffle) {
    order = [all = seeded_permutation(num_samples_, seed_of_epoch(options_.seed, position_.epoch))](
                int64_t position) { return all[static_cast<size_t>(position)]; };
  }
  order_ = std::make_shared<const EpochOrder>(std::move(order));
  order_epoch_ = position_.epoch;
}

Batch DataLoader::fetch(int64_t begin) {
  // Captures no `this`: threads that do not return in time outlive the loader.
  const auto fetch_at = [dataset = dataset_, order = order_, share = share_,
                         num_samples = num_samples_, epoch_size = epoch_size_,
                         is_pinned = options_.pin_memory](int64_t from) {
    const int64_t end = from + std::min(share.batch_size, epoch_size - from);
    return placed_batch(fetched_part(*dataset, *order, share, {from, end}, num_samples), is_pinned);
  };
  if (options_.num_threads == 0) return fetch_at(begin);
  if (!prefetch_) {
    const int64_t size = epoch_size_ - begin;
    const bool has_rest = size % options_.batch_size != 0 && !options_.drop_last;
    const int64_t num_batches = size / options_.batch_size + (has_rest ? 1 : 0);
    const int64_t threads = options_.num_threads;
    prefetch_ = std::make_unique<Prefetch>(
        num_batches,
        [fetch_at, begin, step = share_.batch_size](int64_t index) {
          return fetch_at(begin + index * step);
        },
        PrefetchOptions{.num_threads = options_.num_threads,
                        .depth = std::min(options_.prefetch, num_batches) * threads,
                        .max_depth = std::min(options_.max_prefetch, num_batches) * threads,
                        .timeout = options_.timeout});
  }
  try {
    return prefetch_->items.next();
  } catch (...) {
    (void)end_failed_fetch(prefetch_);
    throw;
  }
}

}  // namespace cadre
