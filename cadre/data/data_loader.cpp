#include "cadre/data/data_loader.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/data/distributed_sampler.h"
#include "cadre/data/prefetcher.h"
#include "cadre/os/system.h"

namespace cadre {
namespace {

constexpr int kMaxThreads = 256;

}  // namespace

struct DataLoader::Ahead {
  Ahead(int64_t num_batches, std::function<Batch(int64_t)> fetch, const DataLoaderOptions& options)
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
  if (options.batch_size < options.world_size || options.rank < 0 ||
      options.rank >= options.world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: batch_size {} on rank {} of {}; expected at least one "
                              "sample for each rank, and a rank in [0, world_size)",
                              options.batch_size, options.rank, options.world_size));
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads || options.prefetch < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: {} threads, each {} batches ahead; expected 0 to {} "
                              "threads, and at least one batch",
                              options.num_threads, options.prefetch, kMaxThreads));
  }
  if (batches_per_epoch() == 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader: {} samples make no batch of {}; use a smaller batch_size",
                      dataset_->size(), options.batch_size));
  }
}

int64_t DataLoader::batches_per_epoch() const {
  const int64_t full = dataset_->size() / options_.batch_size;
  const bool has_rest = dataset_->size() % options_.batch_size != 0;
  return full + (has_rest && !options_.drop_last ? 1 : 0);
}

DataLoader::Epoch DataLoader::epoch(int64_t epoch) {
  if (!is_sought_ || position_.epoch != epoch) position_ = {.epoch = epoch, .samples = 0};
  is_sought_ = false;
  ahead_.reset();
  return Epoch(this);
}

void DataLoader::seek(const LoaderPosition& position) {
  if (position.epoch < 0 || position.samples < 0 || position.samples > dataset_->size()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: position {} in epoch {} lies outside its {} samples",
                              position.samples, position.epoch, dataset_->size()));
  }
  position_ = position;
  is_sought_ = true;
  ahead_.reset();
}

DataLoader::Epoch::Iterator& DataLoader::Epoch::Iterator::operator++() {
  is_at_end_ = !loader_->next(batch_);
  return *this;
}

bool DataLoader::next(Batch& batch) {
  const int64_t begin = position_.samples;
  const int64_t end = std::min(begin + options_.batch_size, dataset_->size());
  if (begin == end || (options_.drop_last && end - begin < options_.batch_size)) {
    ahead_.reset();
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

std::vector<int64_t> DataLoader::share_of(const std::vector<int64_t>& order, int64_t begin,
                                          const DataLoaderOptions& options) {
  const auto end = std::min(begin + options.batch_size, static_cast<int64_t>(order.size()));
  // The first place from `begin` on that is this rank's.
  const int64_t world_size = options.world_size;
  int64_t place = begin + (options.rank - begin % world_size + world_size) % world_size;
  std::vector<int64_t> share;
  for (; place < end; place += world_size) share.push_back(order[static_cast<size_t>(place)]);
  return share;
}

Batch DataLoader::fetch(int64_t begin) {
  if (options_.num_threads == 0) return dataset_->get(share_of(*order_, begin, options_));
  if (!ahead_) {
    const int64_t size = dataset_->size() - begin;
    const int64_t num_batches = options_.drop_last
                                    ? size / options_.batch_size
                                    : (size + options_.batch_size - 1) / options_.batch_size;
    ahead_ = std::make_unique<Ahead>(
        num_batches,
        [dataset = dataset_, order = order_, options = options_, begin](int64_t index) {
          return dataset->get(share_of(*order, begin + index * options.batch_size, options));
        },
        options_);
  }
  try {
    return ahead_->batches.next();
  } catch (...) {
    ahead_.reset();  // asked again, the batch is fetched again
    throw;
  }
}

}  // namespace cadre
