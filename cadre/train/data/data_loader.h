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
#include <memory>
#include <optional>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/train/data/batches/batch_share.h"
#include "cadre/train/data/batches/batch_split.h"
#include "cadre/train/data/batches/loader_epoch.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/data/samplers/sampler.h"

namespace cadre::os {
class System;
}

namespace cadre {

struct DataLoaderOptions {
  int64_t batch_size = 1;  // the number of samples of all ranks together
  // The ranks that split each batch, for example `.ranks = world` or `.ranks = mesh["dp"]`. If
  // nullopt, this process reads whole batches.
  std::optional<Ranks> ranks = {};
  int64_t seed = 0;  // epoch e is shuffled with seed + e
  bool shuffle = true;
  bool drop_last = false;  // if the last batch of an epoch would have fewer samples, it is skipped
  BatchSplit split = BatchSplit::kInTurn;
  // The order of the samples, instead of that of `seed` and `shuffle`. Use the same on all ranks.
  std::shared_ptr<const Sampler> sampler = {};
  // The number of threads that fetch ahead. With 0 the caller fetches each batch when it needs it.
  int num_threads = 0;
  int64_t prefetch = 2;  // the number of batches that each thread may fetch ahead of the caller
  // The bound up to which the loader raises `prefetch` if the caller had to wait for a batch while
  // threads were idle. If it is below `prefetch`, that is the bound.
  int64_t max_prefetch = 8;
  Duration timeout = std::chrono::minutes(5);  // the longest wait for one batch from a thread
  // If true, the tensors of a batch are in pinned memory, made by the thread that fetches it:
  // `batch.data.to(device, /*non_blocking=*/true)` then does not wait. Has no effect in a process
  // without devices. May differ between ranks.
  bool pin_memory = false;
};

class CADRE_EXPORT DataLoader {
 public:
  using Epoch = data::LoaderEpoch<DataLoader>;

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

  // Returns the total time that requests of this rank have waited for their batches.
  Duration data_wait() const { return data_wait_; }

 private:
  friend class data::LoaderEpoch<DataLoader>;
  struct Prefetch;  // owns the threads

  const Dataset& dataset() const;  // throws if the program has moved from this loader
  void end_loops();
  std::shared_ptr<const data::LoopToken> begin_loop(
      const std::shared_ptr<const data::LoopToken>& epoch);
  bool next(Batch& batch, const std::shared_ptr<const data::LoopToken>& loop);
  void make_order();
  Batch fetch(int64_t begin);

  std::shared_ptr<const Dataset> dataset_;
  int64_t num_samples_ = 0;    // the size of the dataset when the loader was made
  int64_t epoch_size_ = 0;     // the number of positions of an epoch
  DataLoaderOptions options_;  // its member `ranks` is not set
  data::BatchShare share_;
  LoaderPosition position_;
  bool is_positioned_ = false;
  data::LoaderLoops loops_{"DataLoader", "seek"};
  std::shared_ptr<const EpochOrder> order_;  // the order of epoch order_epoch_; shared with threads
  int64_t order_epoch_ = -1;                 // -1 if order_ is not set
  std::unique_ptr<Prefetch> prefetch_;       // null until the first batch is requested
  std::unique_ptr<os::System> clock_;
  Duration data_wait_{};
};

template <std::derived_from<Dataset> D>
DataLoader make_data_loader(D dataset, const DataLoaderOptions& options) {
  return DataLoader(std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace cadre
