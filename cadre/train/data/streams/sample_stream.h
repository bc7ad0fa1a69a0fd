// Samples that come one after another, without a known number and without access by index.
//
// All ranks read the same stream, in the same order; a StreamLoader divides its samples among them.
// So the order does not depend on the number of ranks, and a state is valid for any number of
// ranks. To keep that cheap, next() can return a function that makes the sample: the loader calls
// it only on the rank that gets the sample, in one of its threads.
//
// After an exception of next() or load_state(), the next call is start() or load_state().
//
// Threads: one call at a time, from any thread. A function of a StreamItem may run at any later
// time and beside others, so it owns what it needs. Blocking: next() may read. Errors: any
// exception; a loader throws it on all ranks. Source: torchdata.nodes.BaseNode, and iterable
// datasets of torch.utils.data and Hugging Face. Guide: docs/guide/training/data.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

// One sample: a row of a Batch, without the dimension of the batch. `target` may be undefined.
struct Sample {
  at::Tensor data;
  at::Tensor target;
};

// A sample, or the function that makes it.
class StreamItem {
 public:
  explicit StreamItem(Sample sample) : make_([sample = std::move(sample)] { return sample; }) {}
  template <typename Make>
    requires(!std::same_as<std::decay_t<Make>, StreamItem> && std::is_invocable_r_v<Sample, Make&>)
  explicit StreamItem(Make make) : make_(std::move(make)) {}

  // Returns the sample. Every call calls the function again.
  Sample make() const { return make_(); }

 private:
  std::function<Sample()> make_;
};

class CADRE_EXPORT SampleStream {
 public:
  virtual ~SampleStream() = default;

  // Goes to the first sample of an epoch (0 or above). A stream may have another order in each
  // epoch. Everything that was read before is forgotten.
  virtual void start(int64_t epoch) = 0;
  // Returns the next sample, or nullopt after the last one. REQUIRES: start() or load_state() was
  // called before.
  virtual std::optional<StreamItem> next() = 0;

  // Returns what load_state() needs to go to the present position of the present epoch, also in
  // another process. The bytes are equal on all ranks at equal positions.
  virtual std::string state() const = 0;
  // Throws, and changes nothing that start() would not repair, for bytes that state() has not
  // returned, or that belong to a stream with other settings.
  virtual void load_state(std::string_view state) = 0;

  // Returns a number that is equal for equal settings and sources, and different for others. A
  // StreamLoader compares it among its ranks. nullopt: unknown.
  virtual std::optional<uint64_t> digest() const { return std::nullopt; }
};

struct DatasetStreamOptions {
  bool shuffle = true;  // each epoch in the order of a KeyedPermutation, else in order of the index
  int64_t seed = 0;
};

// Returns the samples of a dataset, each once per epoch, in constant memory. A sample is fetched
// by the rank that gets it. Throws kInvalidArgument for a null dataset, and at start() if its size
// is not what it was.
CADRE_EXPORT std::shared_ptr<SampleStream> stream_dataset(std::shared_ptr<const Dataset> dataset,
                                                          const DatasetStreamOptions& options = {});

// Returns the stream with each sample replaced by transform(sample), which runs on the rank that
// gets the sample, in several threads at once. Throws kInvalidArgument for a null stream.
CADRE_EXPORT std::shared_ptr<SampleStream> map_stream(std::shared_ptr<SampleStream> stream,
                                                      std::function<Sample(Sample)> transform);

struct ShuffleOptions {
  int64_t buffer_size = 1000;  // the number of samples that are kept and permuted
  int64_t seed = 0;
};

// Returns the stream with each block of buffer_size successive samples permuted, by a key of the
// seed, the epoch and the number of the block. The state has no samples: the stream goes back to
// the first sample of the block and reads it again. A sample moves by less than buffer_size
// positions; to mix further apart, interleave streams that begin at different places of the data.
// Throws kInvalidArgument for a null stream and for a buffer_size below 1.
CADRE_EXPORT std::shared_ptr<SampleStream> shuffle_stream(std::shared_ptr<SampleStream> stream,
                                                          const ShuffleOptions& options = {});

struct WeightedStream {
  std::shared_ptr<SampleStream> stream;
  double weight = 1;  // relative to the sum of all weights; above 0
};

// What happens when one of the streams has no further sample.
enum class StreamEnd : uint8_t {
  kAllExhausted,    // the others go on, with their weights, until every sample was returned once
  kFirstExhausted,  // the result ends, so the shares of the streams stay as their weights
  // It starts again, the n-th time as its epoch e + n. The result never ends.
  kRestart,
};

struct InterleaveOptions {
  int64_t seed = 0;
  StreamEnd end = StreamEnd::kAllExhausted;
};

// Returns the samples of several streams. The stream of the i-th sample is drawn with the
// probabilities of the weights, by a key of (seed, epoch, i) among those that are not exhausted.
// Throws kInvalidArgument without streams, for null streams, and for weights that are not finite
// and above 0; with kRestart also at next(), for a stream without samples.
CADRE_EXPORT std::shared_ptr<SampleStream> interleave_streams(
    std::vector<WeightedStream> streams, const InterleaveOptions& options = {});

}  // namespace cadre
