// Batches of a dataset in a seeded order, split among the ranks of a group, from any position.
//
// `.batch_size` is the global batch size: the samples of all ranks together. Batch k has the same
// samples on any number of ranks. Within a batch, a rank has the samples that DistributedSampler
// assigns to it, every world_size-th of the epoch, or a consecutive part (BatchSplit). Two ranks'
// shares of a batch differ by at most one sample, and a share may be empty in a short last batch;
// no sample is padded or repeated. DistributedDataParallel and the sharding wrappers weight each
// rank by the rows of its share, so gradients are means over the global batch.
//
// Threads: one; with num_threads above 0, Dataset::get runs ahead of the caller on that many other
// threads, and the delivered batches and their order stay the same. Blocking: the constructor is
// collective in a group of several ranks, until the group's timeout; a batch takes as long as
// Dataset::get, or until a thread has fetched it, at most `.timeout`; the destructor, seek() and
// epoch() wait until the threads have finished their batches. Lifetime: shares the dataset; does
// not keep the group; an Epoch must not outlive its loader. After a kTimeout the threads are left
// alone: they keep the dataset until their Dataset::get returns, if ever, so what get() uses must
// live as long. Errors: kInvalidArgument for options, an epoch or a position out of range, for a
// loader that was moved from, for a batch with another number of rows than samples were asked for,
// for a dataset whose size has changed, and for a batch of a loop that was begun before the last
// epoch(), seek() or begin(): a loader has one position. In the constructor the same error on all
// ranks, if one rank refuses its options or cannot read its dataset, or if options, the number of
// samples or Dataset::digest() differ between ranks. What Dataset::get throws, at its batch, which
// can be requested again; kTimeout. Source: torch.utils.data.DataLoader and torchdata's
// StatefulDataLoader. Guide: docs/guide/training/data.md.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

// The way in which a batch is divided among the ranks.
enum class BatchSplit : uint8_t {
  // Each rank gets every world_size-th sample of the epoch, beginning with the sample at the index
  // of the rank.
  kInTurn,
  // The parts of the ranks, in rank order, are the batch. Use it if the order of samples matters,
  // for example for a capacity of experts.
  kConsecutive,
};

struct DataLoaderOptions {
  int64_t batch_size = 1;  // the number of samples of all ranks together
  // The ranks that split each batch, for example `.ranks = world` or `.ranks = mesh["dp"]`. If
  // nullopt, this process reads whole batches.
  std::optional<Ranks> ranks = {};
  int64_t seed = 0;  // epoch e is shuffled with seed + e
  bool shuffle = true;
  bool drop_last = false;  // a last batch of fewer samples is left out
  BatchSplit split = BatchSplit::kInTurn;
  // The number of threads that fetch ahead. With 0 the caller fetches each batch when it needs it.
  int num_threads = 0;
  int64_t prefetch = 2;  // the number of batches that each thread may be ahead
  Duration timeout = std::chrono::minutes(5);  // the limit of a wait for a batch from a thread
};

// A position that is equal on all ranks, and valid for any number of ranks.
struct LoaderPosition {
  int64_t epoch = 0;
  // The number of samples of this epoch that were delivered to all ranks together.
  int64_t samples = 0;

  friend bool operator==(const LoaderPosition&, const LoaderPosition&) = default;
};

class CADRE_EXPORT DataLoader {
  // The address of a token identifies the epoch() or begin() to which a loop belongs, also after
  // another loader was assigned to this one.
  struct Token {};

 public:
  // The remaining batches of one epoch: `for (const auto& [x, y] : loader.epoch(e))`. The next call
  // of epoch() or seek() ends the epoch, and the next begin() ends earlier iterators: the loops
  // throw at their next batch.
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
      Iterator(DataLoader* loader, std::shared_ptr<const Token> loop)
          : loader_(loader), loop_(std::move(loop)) {
        ++*this;
      }

      DataLoader* loader_;
      std::shared_ptr<const Token> loop_;  // the loader shares it
      Batch batch_;
      bool is_at_end_ = false;
    };

    Iterator begin() const { return Iterator(loader_, loader_->begin_loop(epoch_)); }
    std::default_sentinel_t end() const { return {}; }

   private:
    friend class DataLoader;
    Epoch(DataLoader* loader, std::shared_ptr<const Token> epoch)
        : loader_(loader), epoch_(std::move(epoch)) {}

    DataLoader* loader_;
    std::shared_ptr<const Token> epoch_;  // the loader shares it
  };

  DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options);
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;
  ~DataLoader();

  // Returns the epoch (0 or above) from its start; the first call after a seek() into this epoch
  // returns it from that position.
  Epoch epoch(int64_t epoch);
  int64_t batches_per_epoch() const;
  int64_t batch_size() const { return share_.batch_size; }
  BatchSplit split() const { return share_.split; }

  // Returns the position after the last delivered batch, no matter how many were fetched ahead.
  LoaderPosition position() const { return position_; }
  void seek(const LoaderPosition& position);

 private:
  // Says which part of each batch this rank gets.
  struct Share {
    BatchSplit split = BatchSplit::kInTurn;
    int64_t batch_size = 1;
    int64_t rank = 0;
    int64_t world_size = 1;
  };
  struct Prefetch;  // owns the threads

  const Dataset& dataset() const;  // throws if the program has moved from this loader
  void end_loops();
  std::shared_ptr<const Token> begin_loop(const std::shared_ptr<const Token>& epoch);
  bool next(Batch& batch, const std::shared_ptr<const Token>& loop);
  void make_order();
  // Returns this rank's samples of the batch that begins at index `begin` of the order.
  static std::vector<int64_t> samples_of(const Share& share, const std::vector<int64_t>& order,
                                         int64_t begin);
  Batch fetch(int64_t begin);

  std::shared_ptr<const Dataset> dataset_;
  int64_t num_samples_ = 0;    // the size of the dataset when the loader was made
  DataLoaderOptions options_;  // the member `ranks` is not set
  Share share_;
  LoaderPosition position_;
  bool is_positioned_ = false;
  std::shared_ptr<const Token> epoch_;  // the last epoch() or seek() has made it
  // The last begin() has made it for the loop that may get batches.
  std::shared_ptr<const Token> loop_;
  // The samples of all ranks in epoch order_epoch_. The threads share the list.
  std::shared_ptr<const std::vector<int64_t>> order_;
  int64_t order_epoch_ = -1;            // -1 if order_ is not set
  std::unique_ptr<Prefetch> prefetch_;  // null until the first batch is requested
};

template <std::derived_from<Dataset> D>
DataLoader make_data_loader(D dataset, const DataLoaderOptions& options) {
  return DataLoader(std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace cadre
