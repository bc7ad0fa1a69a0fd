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

class ShuffledStream : public SampleStream {
 public:
  ShuffledStream(std::shared_ptr<SampleStream> stream, const ShuffleOptions& options)
      : stream_(std::move(stream)), options_(options), order_(0, 0) {
    if (stream_ == nullptr || options.buffer_size < 1) {
      throw Error(
          ErrorCode::kInvalidArgument,
          cadre::format("shuffle_stream: {} with a buffer_size of {}; expected a stream, "
                        "and at least 1 sample",
                        stream_ == nullptr ? "a null stream" : "a stream", options.buffer_size));
    }
    Fnv1a hash;
    hash.add("shuffle_stream");
    hash.add(stream_->digest().value_or(0));
    hash.add(static_cast<uint64_t>(options.buffer_size));
    hash.add(static_cast<uint64_t>(options.seed));
    digest_ = hash.value();
  }

  void start(int64_t epoch) override {
    stream_->start(epoch);
    go_to(epoch, 0, stream_->state());
  }

  std::optional<StreamItem> next() override {
    if (position_ == std::ssize(block_)) {
      if (!block_.empty()) go_to(epoch_, block_index_ + 1, stream_->state());
      fill();
      if (block_.empty()) return std::nullopt;
    }
    return std::move(block_[static_cast<size_t>(order_(position_++))]);
  }

  std::string state() const override {
    return StateWriter("shuffle_stream", digest_)
        .number(epoch_)
        .number(block_index_)
        .number(position_)
        .text(block_state_)
        .bytes();
  }

  void load_state(std::string_view state) override {
    StateReader in(state, "shuffle_stream", digest_);
    constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
    const int64_t epoch = in.number("epoch", kLargest);
    const int64_t block = in.number("block", kLargest);
    const int64_t position = in.number("position", options_.buffer_size);
    const std::string_view of_stream = in.text("state of the stream");
    in.end();
    stream_->load_state(of_stream);
    go_to(epoch, block, std::string(of_stream));
    if (position == 0) return;
    fill();
    if (position > std::ssize(block_)) {
      throw Error(ErrorCode::kCorruption,
                  cadre::format("shuffle_stream: the state is at sample {} of a block, which has "
                                "only {} now; the source has other samples than when it was saved",
                                position, block_.size()));
    }
    position_ = position;
  }

  std::optional<uint64_t> digest() const override { return digest_; }

 private:
  void go_to(int64_t epoch, int64_t block, std::string state) {
    epoch_ = epoch;
    block_index_ = block;
    block_state_ = std::move(state);
    block_.clear();
    position_ = 0;
  }

  void fill() {
    while (std::ssize(block_) < options_.buffer_size) {
      std::optional<StreamItem> item = stream_->next();
      if (!item) break;
      block_.push_back(*std::move(item));
    }
    Random keys = keyed_random(static_cast<uint64_t>(options_.seed), static_cast<uint64_t>(epoch_),
                               static_cast<uint64_t>(block_index_));
    order_ = KeyedPermutation(std::ssize(block_), keys.next());
  }

  std::shared_ptr<SampleStream> stream_;
  ShuffleOptions options_;
  uint64_t digest_ = 0;
  int64_t epoch_ = 0;
  int64_t block_index_ = 0;
  std::string block_state_;  // the stream's state before the block's first sample
  std::vector<StreamItem> block_;
  KeyedPermutation order_;  // the order of the samples in the block
  int64_t position_ = 0;    // the number of samples of the block that were returned
};

}  // namespace

std::shared_ptr<SampleStream> shuffle_stream(std::shared_ptr<SampleStream> stream,
                                             const ShuffleOptions& options) {
  return std::make_shared<ShuffledStream>(std::move(stream), options);
}

}  // namespace cadre
