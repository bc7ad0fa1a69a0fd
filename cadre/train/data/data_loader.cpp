#include "cadre/train/data/data_loader.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/train/data/distributed_sampler.h"
#include "cadre/train/data/prefetcher.h"

namespace cadre {
namespace {

constexpr int kMaxThreads = 256;

[[noreturn]] void refuse_older_loop() {
  throw Error(ErrorCode::kInvalidArgument,
              "DataLoader: this loop has ended, because another epoch(), seek() or begin() of its "
              "loader was called since it was begun, and a loader has one position; make a loader "
              "for each loop");
}

constexpr std::string_view kSameOnAllRanks =
    "all ranks need the same batch_size, seed, shuffle, drop_last, split and dataset";

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

// Throws for invalid values of the options that may differ between ranks.
void check_threads(const DataLoaderOptions& options) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads || options.prefetch < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: num_threads is {} and prefetch {}; expected 0 to {} "
                              "threads, and a prefetch of at least 1 batch",
                              options.num_threads, options.prefetch, kMaxThreads));
  }
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

// Checks that the dataset returned as many rows as were requested: fewer rows would change the mean
// over the batch.
Batch checked(Batch batch, size_t num_samples) {
  const auto has_rows = [&](const at::Tensor& tensor) {
    return tensor.dim() > 0 && tensor.size(0) == static_cast<int64_t>(num_samples);
  };
  if (!batch.data.defined()) {
    throw Error(ErrorCode::kInvalidArgument,
                "DataLoader: Dataset::get returned a batch without data");
  }
  for (const at::Tensor& tensor : {batch.data, batch.target}) {
    if (!tensor.defined() || has_rows(tensor)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: Dataset::get was asked for {} samples and returned a "
                              "tensor of {} dimensions with {} rows; expected a row for each "
                              "sample",
                              num_samples, tensor.dim(), tensor.dim() > 0 ? tensor.size(0) : 0));
  }
  return batch;
}

// Returns the batch, in pinned memory if the program has asked for it.
Batch placed(Batch batch, bool is_pinned) {
  if (!is_pinned) return batch;
  return {.data = device::pinned_copy(batch.data), .target = device::pinned_copy(batch.target)};
}

}  // namespace

struct DataLoader::Prefetch {
  Prefetch(int64_t num_batches, std::function<Batch(int64_t)> fetch,
           const DataLoaderOptions& options)
      : batches(*system, num_batches, std::move(fetch),
                {.num_threads = options.num_threads,
                 .depth = std::min(options.prefetch, num_batches) * options.num_threads,
                 .timeout = options.timeout}) {}

  // Destroys the prefetcher on another thread, because its threads may not end for a long time and
  // the caller must not wait for them.
  static void leave_alone(std::unique_ptr<Prefetch> stuck) {
    // A std::function must be copyable, and a lambda that owns a unique_ptr is not.
    std::shared_ptr<Prefetch> kept = std::move(stuck);
    os::run_detached("cadre-closer", [kept = std::move(kept)]() mutable { kept.reset(); });
  }

  std::unique_ptr<os::System> system = os::make_native_system();
  Prefetcher<Batch> batches;
};

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() = default;

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
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
    check_threads(options);
    num_samples_ = size_of(dataset_.get());
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
  check_options(options, num_samples_, share_.world_size);
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
  const int64_t full = num_samples_ / options_.batch_size;
  const bool has_rest = num_samples_ % options_.batch_size != 0;
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
  return Epoch(this, epoch_);
}

void DataLoader::end_loops() {
  epoch_ = loop_ = std::make_shared<Token>();
  prefetch_.reset();
}

std::shared_ptr<const DataLoader::Token> DataLoader::begin_loop(
    const std::shared_ptr<const Token>& epoch) {
  (void)dataset();
  if (epoch != epoch_) refuse_older_loop();
  return loop_ = std::make_shared<Token>();
}

void DataLoader::seek(const LoaderPosition& position) {
  (void)dataset();
  if (position.epoch < 0 || position.samples < 0 || position.samples > num_samples_) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("DataLoader: cannot seek to sample {} of epoch {}; expected a sample in "
                      "[0, {}] of an epoch from 0",
                      position.samples, position.epoch, num_samples_));
  }
  position_ = position;
  is_positioned_ = true;
  end_loops();
}

DataLoader::Epoch::Iterator& DataLoader::Epoch::Iterator::operator++() {
  is_at_end_ = !loader_->next(batch_, loop_);
  return *this;
}

bool DataLoader::next(Batch& batch, const std::shared_ptr<const Token>& loop) {
  if (const int64_t now = dataset().size(); now != num_samples_) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("DataLoader: the dataset had {} samples when the loader was made and "
                              "has {} now; make another loader, on all ranks",
                              num_samples_, now));
  }
  if (loop != loop_) refuse_older_loop();
  const int64_t begin = position_.samples;
  const int64_t end = begin + std::min(options_.batch_size, num_samples_ - begin);
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
    *order = seeded_permutation(num_samples_, seed_of_epoch(options_.seed, position_.epoch));
  } else {
    order->resize(static_cast<size_t>(num_samples_));
    std::iota(order->begin(), order->end(), int64_t{0});
  }
  order_ = std::move(order);
  order_epoch_ = position_.epoch;
}

std::vector<int64_t> DataLoader::samples_of(const Share& share, const std::vector<int64_t>& order,
                                            int64_t begin) {
  const int64_t end =
      begin + std::min(share.batch_size, static_cast<int64_t>(order.size()) - begin);
  if (share.split == BatchSplit::kConsecutive) {
    const int64_t count = end - begin;
    const auto first = order.begin() + begin;
    return {first + count * share.rank / share.world_size,
            first + count * (share.rank + 1) / share.world_size};
  }
  // The first index at or after `begin` that is congruent to the rank, modulo the world size.
  int64_t index =
      begin + (share.rank - begin % share.world_size + share.world_size) % share.world_size;
  std::vector<int64_t> samples;
  for (; index < end; index += share.world_size) {
    samples.push_back(order[static_cast<size_t>(index)]);
  }
  return samples;
}

Batch DataLoader::fetch(int64_t begin) {
  if (options_.num_threads == 0) {
    const std::vector<int64_t> samples = samples_of(share_, *order_, begin);
    return placed(checked(dataset().get(samples), samples.size()), options_.pin_memory);
  }
  if (!prefetch_) {
    const int64_t size = num_samples_ - begin;
    const bool has_rest = size % options_.batch_size != 0 && !options_.drop_last;
    prefetch_ = std::make_unique<Prefetch>(
        size / options_.batch_size + (has_rest ? 1 : 0),
        [dataset = dataset_, order = order_, share = share_, begin,
         is_pinned = options_.pin_memory](int64_t index) {
          const std::vector<int64_t> samples =
              samples_of(share, *order, begin + index * share.batch_size);
          return placed(checked(dataset->get(samples), samples.size()), is_pinned);
        },
        options_);
  }
  // If next() throws, the next request fetches the same batch again.
  try {
    return prefetch_->batches.next();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kTimeout) Prefetch::leave_alone(std::move(prefetch_));
    prefetch_.reset();
    throw;
  } catch (...) {
    prefetch_.reset();
    throw;
  }
}

}  // namespace cadre
