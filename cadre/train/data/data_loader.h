// Batches of a dataset in a seeded order, split among the ranks of a group, from any position.
//
// `.batch_size` is the global batch size: the samples of all ranks together. Batch k has the same
// samples on any number of ranks. Within a batch, a rank gets either the samples that
// DistributedSampler would assign to it, which are every world_size-th of the epoch, or a
// consecutive slice (BatchSplit). The shares of two ranks differ by at most one sample, and a share
// may be empty in a short last batch; no sample is padded or repeated. DistributedDataParallel and
// the sharding wrappers weight each rank by the rows of its share, so gradients are means over the
// global batch.
//
// Threads: one. If num_threads is above 0, that many other threads call Dataset::get ahead of the
// caller; the batches and their order stay the same. Blocking: the constructor is collective in a
// group of several ranks and waits at most for the group's timeout. A request for a batch takes as
// long as Dataset::get, or waits at most `.timeout` for a thread that fetches it. The destructor,
// seek() and epoch() wait until the threads have finished their batches. Lifetime: shares the
// dataset; does not keep the group; an Epoch must not outlive its loader. After a kTimeout the
// threads are not joined: they keep the dataset until their Dataset::get returns, if ever, so
// whatever get() uses must live as long.
//
// Errors: kInvalidArgument for invalid options, for an epoch or a position out of range, for a
// loader that was moved from, for a batch whose number of rows is not the number of samples, and
// for a dataset whose size has changed. A loader has one position, so a loop also gets
// kInvalidArgument at its next batch if epoch(), seek() or begin() was called after it began. The
// constructor throws the same error on all ranks if one rank has invalid options or cannot read its
// dataset, or if options, the number of samples or Dataset::digest() differ between ranks. An
// exception of Dataset::get is thrown at its batch, which can be requested again. kTimeout if a
// batch is not ready in time. Source: torch.utils.data.DataLoader and torchdata's
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
  // The slices of the ranks, concatenated in rank order, are the batch. Use it if the order of
  // samples matters, for example if experts have a limited capacity and drop the last tokens.
  kConsecutive,
};

struct DataLoaderOptions {
  int64_t batch_size = 1;  // the number of samples of all ranks together
  // The ranks that split each batch, for example `.ranks = world` or `.ranks = mesh["dp"]`. If
  // nullopt, this process reads whole batches.
  std::optional<Ranks> ranks = {};
  int64_t seed = 0;  // epoch e is shuffled with seed + e
  bool shuffle = true;
  bool drop_last = false;  // if the last batch of an epoch would have fewer samples, it is skipped
  BatchSplit split = BatchSplit::kInTurn;
  // The number of threads that fetch ahead. With 0 the caller fetches each batch when it needs it.
  int num_threads = 0;
  int64_t prefetch = 2;  // the number of batches that each thread may fetch ahead of the caller
  Duration timeout = std::chrono::minutes(5);  // the longest wait for one batch from a thread
  // If true, the tensors of a batch are in pinned memory, made by the thread that fetches it:
  // `batch.data.to(device, /*non_blocking=*/true)` then does not wait. Has no effect in a process
  // without devices. May differ between ranks.
  bool pin_memory = false;
};

// A position that is equal on all ranks, and valid for any number of ranks.
struct LoaderPosition {
  int64_t epoch = 0;
  // The number of samples of this epoch that were delivered to all ranks together.
  int64_t samples = 0;

  friend bool operator==(const LoaderPosition&, const LoaderPosition&) = default;
};

class CADRE_EXPORT DataLoader {
  // A token's address identifies the epoch() or begin() call to which a loop belongs, even after
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
      std::shared_ptr<const Token> loop_;  // shared with the loader
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
    std::shared_ptr<const Token> epoch_;  // shared with the loader
  };

  DataLoader(std::shared_ptr<const Dataset> dataset, const DataLoaderOptions& options);
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;
  ~DataLoader();

  // Returns the batches of an epoch (0 or above), from its start. The first call after a seek()
  // into this epoch returns the batches from that position on.
  Epoch epoch(int64_t epoch);
  int64_t batches_per_epoch() const;
  int64_t batch_size() const { return share_.batch_size; }
  BatchSplit split() const { return share_.split; }

  // Returns the position after the last batch that the caller got; batches that threads have
  // fetched ahead do not count.
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
  DataLoaderOptions options_;  // its member `ranks` is not set
  Share share_;
  LoaderPosition position_;
  bool is_positioned_ = false;
  std::shared_ptr<const Token> epoch_;  // made by the last call of epoch() or seek()
  // Made by the last begin(). Only the loop that has this token may get batches.
  std::shared_ptr<const Token> loop_;
  // The samples of all ranks in the order of epoch order_epoch_. The threads share the list.
  std::shared_ptr<const std::vector<int64_t>> order_;
  int64_t order_epoch_ = -1;            // -1 if order_ is not set
  std::unique_ptr<Prefetch> prefetch_;  // null until the first batch is requested
};

template <std::derived_from<Dataset> D>
DataLoader make_data_loader(D dataset, const DataLoaderOptions& options) {
  return DataLoader(std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace cadre
