// Batches of a dataset in a seeded order, each rank's share of them, from any position.
//
// A batch is cut from the order of all ranks' samples together, so the same samples make up batch k
// whatever the number of ranks; within it a rank takes the places that DistributedSampler gives it
// (every world_size-th of the epoch). Shares of one batch differ by at most one sample, and may be
// empty in a short last batch; DistributedDataParallel weights them by their sizes. Nothing is
// padded or repeated. Threads: one; with num_threads above 0 Dataset::get runs on that many others,
// ahead of the caller, and what is delivered, and in which order, stays the same. Blocking: as
// Dataset::get, or until it has come from a thread; the destructor, seek() and epoch() let the
// threads finish their batches. Lifetime: shares the dataset; an Epoch must not outlive its loader.
// Errors: kInvalidArgument for a batch or a position that cannot be; what Dataset::get throws, at
// its batch, which may be asked for again; kTimeout. Source: torch.utils.data.DataLoader and
// torchdata's StatefulDataLoader.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/data/dataset.h"

namespace cadre {

struct DataLoaderOptions {
  int64_t batch_size = 1;  // samples of all ranks together
  Rank rank = 0;
  int world_size = 1;
  int64_t seed = 0;  // of the order; epoch e is shuffled with seed + e
  bool shuffle = true;
  bool drop_last = false;  // skip a last batch of fewer samples
  int num_threads = 0;     // that fetch ahead; 0: the caller fetches each batch when it wants it
  int64_t prefetch = 2;    // batches that each of them may be ahead
  Duration timeout = std::chrono::minutes(5);  // of a batch from a thread
};

// The same for all ranks, and for any number of them.
struct LoaderPosition {
  int64_t epoch = 0;
  int64_t samples = 0;  // of this epoch, delivered to all ranks together

  friend bool operator==(const LoaderPosition&, const LoaderPosition&) = default;
};

class CADRE_EXPORT DataLoader {
 public:
  // The batches of one epoch that are still to come: `for (const auto& [x, y] : loader.epoch(e))`.
  class CADRE_EXPORT Epoch {
   public:
    class CADRE_EXPORT Iterator {
     public:
      using difference_type = std::ptrdiff_t;
      using value_type = Batch;

      const Batch& operator*() const { return batch_; }
      const Batch* operator->() const { return &batch_; }
      Iterator& operator++();
      void operator++(int) { ++*this; }
      friend bool operator==(const Iterator& it, std::default_sentinel_t) { return it.is_at_end_; }

     private:
      friend class Epoch;
      explicit Iterator(DataLoader* loader) : loader_(loader) { ++*this; }

      DataLoader* loader_;
      Batch batch_;
      bool is_at_end_ = false;
    };

    Iterator begin() const { return Iterator(loader_); }
    std::default_sentinel_t end() const { return {}; }

   private:
    friend class DataLoader;
    explicit Epoch(DataLoader* loader) : loader_(loader) {}

    DataLoader* loader_;
  };

  DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options);
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;
  ~DataLoader();

  // From the start of the epoch; after seek() to a place inside it, once, from there.
  Epoch epoch(int64_t epoch);
  int64_t batches_per_epoch() const;

  // Behind the last batch that was delivered, however many were fetched.
  LoaderPosition position() const { return position_; }
  void seek(const LoaderPosition& position);

 private:
  struct Ahead;  // the threads

  bool next(Batch& batch);
  void make_order();
  // This rank's samples of the batch that begins at place `begin` of the order.
  static std::vector<int64_t> share_of(const std::vector<int64_t>& order, int64_t begin,
                                       const DataLoaderOptions& options);
  Batch fetch(int64_t begin);

  std::shared_ptr<const Dataset> dataset_;
  DataLoaderOptions options_;
  LoaderPosition position_;
  bool is_sought_ = false;
  // Of epoch order_epoch_, all ranks' samples; shared with the threads.
  std::shared_ptr<const std::vector<int64_t>> order_;
  int64_t order_epoch_ = -1;
  std::unique_ptr<Ahead> ahead_;  // none until a batch is asked for
};

template <std::derived_from<Dataset> D>
DataLoader make_data_loader(D dataset, const DataLoaderOptions& options) {
  return DataLoader(std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace cadre
