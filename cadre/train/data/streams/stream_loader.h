// Batches of a stream, divided among the ranks of a group, with an exact state.
//
//   cadre::StreamLoader loader(cadre::shuffle_stream(stream, {.buffer_size = 10000}),
//                              {.batch_size = 64, .ranks = world, .num_threads = 4});
//   for (const auto& [x, y] : loader.epoch(0)) ...
//   save(loader.state());  // in another run, on any number of ranks: loader.load_state(bytes)
//
// `.batch_size` is the global batch size. Every rank reads the whole stream in the same order and
// makes only the samples of its share, so batch k has the same samples on any number of ranks. At
// the end of a stream the last batch may be short: the shares then differ by at most one sample and
// may be empty (a batch of 0 rows), which DistributedDataParallel and the sharding wrappers weight
// by rows; `.drop_last` skips that batch. A stream without samples gives an epoch without batches.
//
// Threads: one. With num_threads above 0, that many threads read the stream, one at a time, and
// make samples in parallel; batches and order stay the same. Blocking: the constructor, each
// request for a batch and load_state() are collective in a group of several ranks: a request costs
// an all_gather of 32 bytes per rank, by which an error of one rank becomes an error of all.
// Lifetime: shares the stream, which nobody else may use meanwhile; keeps the group; an Epoch must
// not outlive its loader.
//
// Errors: kInvalidArgument for invalid options, an epoch below 0, a loop that has ended, a loader
// that was moved from, samples of different shapes, and, on all ranks, for options or streams that
// differ between ranks. An exception of the stream, of a sample's function or of collate is thrown
// at its batch on all ranks; the batch can be requested again. kTimeout if a batch is not ready in
// time; the stream is then in use by a thread that has not returned, and the loader can only be
// destroyed. Source: torchdata's StatefulDataLoader over an IterableDataset. Guide:
// docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/tensor/mesh/ranks.h"
#include "cadre/train/data/batches/batch_share.h"
#include "cadre/train/data/batches/batch_split.h"
#include "cadre/train/data/batches/loader_epoch.h"
#include "cadre/train/data/dataset.h"
#include "cadre/train/data/streams/sample_stream.h"

namespace cadre::os {
class System;
}

namespace cadre {

// Makes a batch of at least one sample, with a row for each.
using Collate = std::function<Batch(const std::vector<Sample>& samples)>;

// Stacks the data and the targets: of N samples of shape (...), a batch of shape (N, ...). Throws
// kInvalidArgument for different shapes or dtypes, and if only some samples have a target.
CADRE_EXPORT Batch stack_samples(const std::vector<Sample>& samples);

struct StreamLoaderOptions {
  int64_t batch_size = 1;  // the number of samples of all ranks together
  // The ranks that split each batch. If nullopt, this process reads whole batches.
  std::optional<Ranks> ranks = {};
  bool drop_last = false;  // if the last batch of an epoch would have fewer samples, it is skipped
  BatchSplit split = BatchSplit::kInTurn;
  Collate collate = stack_samples;
  // The number of threads that fetch ahead. With 0 the caller fetches each batch when it needs it.
  int num_threads = 0;
  int64_t prefetch = 2;  // the number of batches that each thread may fetch ahead of the caller
  // The bound up to which the loader raises `prefetch` if the caller had to wait for a batch while
  // threads were idle. If it is below `prefetch`, that is the bound.
  int64_t max_prefetch = 8;
  Duration timeout = std::chrono::minutes(5);  // the longest wait for one batch from a thread
  bool pin_memory = false;                     // as DataLoaderOptions::pin_memory
};

class CADRE_EXPORT StreamLoader {
 public:
  using Epoch = data::LoaderEpoch<StreamLoader>;

  StreamLoader(std::shared_ptr<SampleStream> stream, const StreamLoaderOptions& options);
  StreamLoader(StreamLoader&&) noexcept;
  StreamLoader& operator=(StreamLoader&&) noexcept;
  ~StreamLoader();

  // Returns the batches of an epoch (0 or above), from its start. The first call after a
  // load_state() of this epoch returns the batches from that state on.
  Epoch epoch(int64_t epoch);
  int64_t batch_size() const { return share_.batch_size; }

  // Returns the position after the last batch that the caller got; batches that threads have
  // fetched ahead do not count.
  LoaderPosition position() const { return position_; }
  // Returns the state at position(): the position, and the state of the stream. It is equal on all
  // ranks, and valid for any number of ranks, batch_size, split and number of threads.
  std::string state() const;
  // Goes to a state. Collective. Throws on all ranks, and keeps the position, if it throws on one
  // of them or if the states differ.
  void load_state(std::string_view state);

  // Returns the total time that requests of this rank have waited for their batches.
  Duration data_wait() const { return data_wait_; }

 private:
  friend class data::LoaderEpoch<StreamLoader>;
  struct Fetched;
  struct Prefetch;  // owns the threads
  class Reader;     // takes the samples of each batch from the stream

  SampleStream& stream() const;       // throws if the program has moved from this loader
  SampleStream& free_stream() const;  // throws also if a thread still uses the stream
  void end_loops();
  std::shared_ptr<const data::LoopToken> begin_loop(
      const std::shared_ptr<const data::LoopToken>& epoch);
  bool next(Batch& batch, const std::shared_ptr<const data::LoopToken>& loop);
  Fetched fetch_on_all_ranks();
  Fetched fetch();
  Fetched fetch_from_threads();
  void check_equal(const std::vector<std::vector<int64_t>>& words) const;

  std::shared_ptr<SampleStream> stream_;
  StreamLoaderOptions options_;
  std::optional<ProcessGroup> group_;  // nullopt if this process reads whole batches
  data::BatchShare share_;
  LoaderPosition position_;
  // The state of the stream at position_; nullopt at the start of an epoch that was not requested
  // yet.
  std::optional<std::string> stream_state_;
  bool is_positioned_ = false;
  bool is_stuck_ = false;  // a thread that has not returned in time uses the stream
  data::LoaderLoops loops_{"StreamLoader", "load_state"};
  // Null if the stream is not at position_. The threads share it.
  std::shared_ptr<Reader> reader_;
  int64_t num_fetched_ = 0;  // the number of batches that the caller has fetched from reader_
  std::unique_ptr<Prefetch> prefetch_;  // null until a thread has to fetch
  std::unique_ptr<os::System> clock_;
  Duration data_wait_{};
};

}  // namespace cadre
