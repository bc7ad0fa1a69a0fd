#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/samplers/keyed_permutation.h"
#include "cadre/train/data/streams/sample_stream.h"
#include "cadre/train/data/streams/stream_state.h"

namespace cadre {
namespace {

class InterleavedStream : public SampleStream {
 public:
  InterleavedStream(std::vector<WeightedStream> streams, const InterleaveOptions& options)
      : options_(options) {
    if (streams.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "interleave_streams: there are no streams");
    }
    Fnv1a hash;
    hash.add("interleave_streams");
    for (const auto part : {static_cast<uint64_t>(options.seed), static_cast<uint64_t>(options.end),
                            static_cast<uint64_t>(streams.size())}) {
      hash.add(part);
    }
    for (WeightedStream& one : streams) {
      if (one.stream == nullptr || !std::isfinite(one.weight) || one.weight <= 0) {
        throw Error(ErrorCode::kInvalidArgument,
                    cadre::format("interleave_streams: stream {} of {} {} a weight of {}; expected "
                                  "a stream, and a finite weight above 0",
                                  sources_.size(), streams.size(),
                                  one.stream == nullptr ? "is null, with" : "has", one.weight));
      }
      for (const Source& other : sources_) {
        if (other.stream == one.stream) {
          throw Error(ErrorCode::kInvalidArgument,
                      cadre::format("interleave_streams: stream {} is the same object as an "
                                    "earlier one, so both would take its samples; make two, or "
                                    "add up the weights",
                                    sources_.size()));
        }
      }
      hash.add(std::bit_cast<uint64_t>(one.weight));
      hash.add(one.stream->digest().value_or(0));
      sources_.push_back({.stream = std::move(one.stream), .weight = one.weight});
    }
    digest_ = hash.value();
    double total = 0;
    for (const Source& source : sources_) total += source.weight;
    if (!std::isfinite(total)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "interleave_streams: the sum of the weights is not finite; divide all by one "
                  "number");
    }
  }

  void start(int64_t epoch) override {
    epoch_ = epoch;
    index_ = 0;
    for (Source& source : sources_) {
      source.stream->start(epoch);
      source.num_passes = 0;
      source.is_exhausted = false;
    }
  }

  std::optional<StreamItem> next() override {
    while (Source* const source = draw()) {
      if (std::optional<StreamItem> item = source->stream->next()) {
        ++index_;
        return item;
      }
      switch (options_.end) {
        case StreamEnd::kAllExhausted:
          source->is_exhausted = true;
          break;
        case StreamEnd::kFirstExhausted:
          for (Source& each : sources_) each.is_exhausted = true;
          break;
        case StreamEnd::kRestart:
          ++index_;
          return first_of_next_pass(*source);
      }
    }
    return std::nullopt;
  }

  std::string state() const override {
    StateWriter out("interleave_streams", digest_);
    out.number(epoch_).number(index_);
    for (const Source& source : sources_) {
      out.number(source.num_passes)
          .number(source.is_exhausted ? 1 : 0)
          .text(source.stream->state());
    }
    return out.bytes();
  }

  void load_state(std::string_view state) override {
    StateReader in(state, "interleave_streams", digest_);
    constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
    const int64_t epoch = in.number("epoch", kLargest);
    const int64_t index = in.number("index", kLargest);
    struct Loaded {
      int64_t num_passes;
      bool is_exhausted;
      std::string_view state;
    };
    std::vector<Loaded> loaded;
    for (size_t i = 0; i < sources_.size(); ++i) {
      const int64_t num_passes = in.number("number of passes", kLargest);
      const bool is_exhausted = in.number("mark of an end", 1) == 1;
      loaded.push_back({num_passes, is_exhausted, in.text("state of a stream")});
    }
    in.end();
    for (size_t i = 0; i < sources_.size(); ++i) {
      sources_[i].stream->load_state(loaded[i].state);
      sources_[i].num_passes = loaded[i].num_passes;
      sources_[i].is_exhausted = loaded[i].is_exhausted;
    }
    epoch_ = epoch;
    index_ = index;
  }

  std::optional<uint64_t> digest() const override { return digest_; }

 private:
  struct Source {
    std::shared_ptr<SampleStream> stream;
    double weight = 1;
    int64_t num_passes = 0;  // how often it was started again in this epoch
    bool is_exhausted = false;
  };

  // Returns the source of the sample at index_, or null if all are exhausted.
  Source* draw() {
    double total = 0;
    Source* last = nullptr;
    for (Source& source : sources_) {
      if (source.is_exhausted) continue;
      total += source.weight;
      last = &source;
    }
    Random keys = keyed_random(static_cast<uint64_t>(options_.seed), static_cast<uint64_t>(epoch_),
                               static_cast<uint64_t>(index_));
    double left = keys.unit() * total;
    for (Source& source : sources_) {
      if (source.is_exhausted) continue;
      left -= source.weight;
      if (left < 0) return &source;
    }
    return last;  // rounding has left a rest of 0 or more
  }

  std::optional<StreamItem> first_of_next_pass(Source& source) {
    ++source.num_passes;
    source.stream->start(epoch_ + source.num_passes);
    std::optional<StreamItem> item = source.stream->next();
    if (!item) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("interleave_streams: stream {} of {} has no samples in pass {} of "
                        "epoch {}, so StreamEnd::kRestart cannot go on; remove the stream",
                        &source - sources_.data(), sources_.size(), source.num_passes, epoch_));
    }
    return item;
  }

  InterleaveOptions options_;
  std::vector<Source> sources_;
  uint64_t digest_ = 0;
  int64_t epoch_ = 0;
  int64_t index_ = 0;  // the number of samples that were returned in this epoch
};

}  // namespace

std::shared_ptr<SampleStream> interleave_streams(std::vector<WeightedStream> streams,
                                                 const InterleaveOptions& options) {
  return std::make_shared<InterleavedStream>(std::move(streams), options);
}

}  // namespace cadre
