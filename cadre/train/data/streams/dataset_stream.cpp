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

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();

Sample first_row(const Batch& batch) {
  const auto row = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.select(0, 0) : tensor;
  };
  if (!batch.data.defined() || batch.data.dim() == 0 || batch.data.size(0) != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "stream_dataset: Dataset::get was asked for 1 sample; expected a batch with data "
                "of 1 row");
  }
  return {.data = row(batch.data), .target = row(batch.target)};
}

class DatasetStream : public SampleStream {
 public:
  DatasetStream(std::shared_ptr<const Dataset> dataset, const DatasetStreamOptions& options)
      : dataset_(std::move(dataset)), options_(options), order_(0, 0) {
    if (dataset_ == nullptr) {
      throw Error(ErrorCode::kInvalidArgument, "stream_dataset: the dataset is null");
    }
    size_ = dataset_->size();
    Fnv1a hash;
    hash.add("stream_dataset");
    hash.add(dataset_->digest().value_or(0));
    for (const int64_t part : {size_, options.seed, int64_t{options.shuffle}}) {
      hash.add(static_cast<uint64_t>(part));
    }
    digest_ = hash.value();
    start(0);
  }

  void start(int64_t epoch) override {
    if (const int64_t now = dataset_->size(); now != size_ || now < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("stream_dataset: the dataset had {} samples when the stream was "
                                "made and has {} now; make another stream, on all ranks",
                                size_, now));
    }
    epoch_ = epoch;
    position_ = 0;
    order_ = KeyedPermutation(
        size_,
        keyed_random(static_cast<uint64_t>(options_.seed), static_cast<uint64_t>(epoch), 0).next());
  }

  std::optional<StreamItem> next() override {
    if (position_ == size_) return std::nullopt;
    const int64_t index = options_.shuffle ? order_(position_) : position_;
    ++position_;
    return StreamItem([dataset = dataset_, index] { return first_row(dataset->get({&index, 1})); });
  }

  std::string state() const override {
    return StateWriter("stream_dataset", digest_).number(epoch_).number(position_).bytes();
  }

  void load_state(std::string_view state) override {
    StateReader in(state, "stream_dataset", digest_);
    const int64_t epoch = in.number("epoch", kAnyNumber);
    const int64_t position = in.number("position", size_);
    in.end();
    start(epoch);
    position_ = position;
  }

  std::optional<uint64_t> digest() const override { return digest_; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  DatasetStreamOptions options_;
  int64_t size_ = 0;
  uint64_t digest_ = 0;
  int64_t epoch_ = 0;
  int64_t position_ = 0;
  KeyedPermutation order_;
};

class MappedStream : public SampleStream {
 public:
  MappedStream(std::shared_ptr<SampleStream> stream, std::function<Sample(Sample)> transform)
      : stream_(std::move(stream)),
        transform_(std::make_shared<const std::function<Sample(Sample)>>(std::move(transform))) {
    if (stream_ == nullptr || *transform_ == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "map_stream: the stream or the transform is null; pass both");
    }
  }

  void start(int64_t epoch) override { stream_->start(epoch); }
  std::optional<StreamItem> next() override {
    std::optional<StreamItem> item = stream_->next();
    if (!item) return std::nullopt;
    return StreamItem(
        [transform = transform_, item = *std::move(item)] { return (*transform)(item.make()); });
  }
  std::string state() const override { return stream_->state(); }
  void load_state(std::string_view state) override { stream_->load_state(state); }
  std::optional<uint64_t> digest() const override { return stream_->digest(); }

 private:
  std::shared_ptr<SampleStream> stream_;
  // Shared with the items, which may outlive the stream.
  std::shared_ptr<const std::function<Sample(Sample)>> transform_;
};

}  // namespace

std::shared_ptr<SampleStream> stream_dataset(std::shared_ptr<const Dataset> dataset,
                                             const DatasetStreamOptions& options) {
  return std::make_shared<DatasetStream>(std::move(dataset), options);
}

std::shared_ptr<SampleStream> map_stream(std::shared_ptr<SampleStream> stream,
                                         std::function<Sample(Sample)> transform) {
  return std::make_shared<MappedStream>(std::move(stream), std::move(transform));
}

}  // namespace cadre
