#include "cadre/data/data_loader.h"

#include <algorithm>
#include <numeric>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/data/distributed_sampler.h"

namespace cadre {

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
  if (options.batch_size < options.world_size || options.rank < 0 ||
      options.rank >= options.world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: batch_size {} on rank {} of {}; expected at least one "
                              "sample for each rank, and a rank in [0, world_size)",
                              options.batch_size, options.rank, options.world_size));
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
}

DataLoader::Epoch::Iterator& DataLoader::Epoch::Iterator::operator++() {
  is_at_end_ = !loader_->next(batch_);
  return *this;
}

bool DataLoader::next(Batch& batch) {
  const int64_t begin = position_.samples;
  const int64_t end = std::min(begin + options_.batch_size, dataset_->size());
  if (begin == end || (options_.drop_last && end - begin < options_.batch_size)) return false;
  if (order_epoch_ != position_.epoch) {
    if (options_.shuffle) {
      order_ = seeded_permutation(dataset_->size(), options_.seed + position_.epoch);
    } else {
      order_.resize(static_cast<size_t>(dataset_->size()));
      std::iota(order_.begin(), order_.end(), int64_t{0});
    }
    order_epoch_ = position_.epoch;
  }
  // The first place from `begin` on that is this rank's.
  const int64_t world_size = options_.world_size;
  int64_t place = begin + (options_.rank - begin % world_size + world_size) % world_size;
  std::vector<int64_t> share;
  for (; place < end; place += world_size) share.push_back(order_[static_cast<size_t>(place)]);
  batch = dataset_->get(share);
  position_.samples = end;
  return true;
}

}  // namespace cadre
