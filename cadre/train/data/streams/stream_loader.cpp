#include "cadre/train/data/streams/stream_loader.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/train/data/batches/fetched_batch.h"
#include "cadre/train/data/streams/stream_state.h"

namespace cadre {
namespace {

constexpr int64_t kMaxPrefetch = int64_t{1} << 32;  // a number of batches that no memory holds
constexpr const char* kLoader = "StreamLoader";

at::Tensor stacked(const std::vector<Sample>& samples, at::Tensor Sample::*member,
                   std::string_view name) {
  std::vector<at::Tensor> rows;
  const at::Tensor& first = samples.front().*member;
  for (size_t i = 0; i < samples.size(); ++i) {
    const at::Tensor& row = samples[i].*member;
    if (row.defined() == first.defined() &&
        (!row.defined() || (row.sizes() == first.sizes() && row.dtype() == first.dtype()))) {
      rows.push_back(row);
      continue;
    }
    const auto text = [](const at::Tensor& tensor) {
      if (!tensor.defined()) return std::string("none");
      std::string shape;
      for (const int64_t size : tensor.sizes()) shape += cadre::format(" {}", size);
      return cadre::format("{} with the sizes [{} ]", std::string(tensor.dtype().name()), shape);
    };
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("stack_samples: the {} of sample 0 of the batch is {} and that of "
                              "sample {} is {}; make them equal in a transform, or pass a collate "
                              "that pads",
                              name, text(first), i, text(row)));
  }
  return first.defined() ? at::stack(rows) : first;
}

void check_batch_size(int64_t batch_size, int64_t world_size) {
  if (batch_size >= world_size) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("StreamLoader: batch_size is {}, the samples of all {} ranks together; "
                            "expected at least one sample for each rank",
                            batch_size, world_size));
}

}  // namespace

Batch stack_samples(const std::vector<Sample>& samples) {
  if (samples.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "stack_samples: there are no samples");
  }
  return {.data = stacked(samples, &Sample::data, "data"),
          .target = stacked(samples, &Sample::target, "target")};
}

struct StreamLoader::Fetched {
  Batch batch;
  int64_t num_samples = 0;   // those of all ranks; 0 after the last batch
  std::string stream_state;  // after the batch
};

struct StreamLoader::Prefetch : ThreadedFetch<Fetched> {
  using ThreadedFetch::ThreadedFetch;
};

// Divides the stream into batches. Threads: any; each takes its batch from the one stream in turn,
// while the others make samples.
class StreamLoader::Reader {
 public:
  Reader(std::shared_ptr<SampleStream> stream, const data::BatchShare& share,
         LoaderPosition position, const StreamLoaderOptions& options)
      : stream_(std::move(stream)),
        share_(share),
        position_(position.samples),
        drop_last_(options.drop_last),
        collate_(options.collate),
        is_pinned_(options.pin_memory) {}

  // Returns the batch with this number, counted from the reader's first batch.
  Fetched fetch(int64_t index) {
    Planned planned = plan(index);
    Fetched fetched{.num_samples = planned.num_samples,
                    .stream_state = std::move(planned.stream_state)};
    if (planned.num_samples == 0) return fetched;
    std::vector<Sample> samples;
    for (const StreamItem& item : planned.items) samples.push_back(item.make());
    // If this rank's share is empty, another rank's sample gives the shape of the empty batch.
    fetched.batch = checked_batch("StreamLoader: collate", collate_(samples), samples.size());
    if (!planned.is_own) {
      const auto no_rows = [](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.narrow(0, 0, 0) : tensor;
      };
      fetched.batch = {.data = no_rows(fetched.batch.data),
                       .target = no_rows(fetched.batch.target)};
    }
    fetched.batch = placed_batch(std::move(fetched.batch), is_pinned_);
    return fetched;
  }

 private:
  struct Planned {
    std::vector<StreamItem> items;  // this rank's, or one of another rank
    bool is_own = true;
    int64_t num_samples = 0;
    std::string stream_state;
  };

  // The batches before `index` that no thread has asked for yet are read first, and kept.
  Planned plan(int64_t index) {
    const std::lock_guard lock(mutex_);
    // The batches that were read before a failure are whole: the thread of a later batch may have
    // read them, and has failed at its own.
    if (failure_ && index >= num_planned_) std::rethrow_exception(failure_);
    try {
      while (num_planned_ <= index) planned_.emplace(num_planned_++, read());
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    const auto found = planned_.find(index);
    Planned result = std::move(found->second);
    planned_.erase(found);
    return result;
  }

  Planned read() {
    std::vector<StreamItem> all;
    while (!is_at_end_ && std::ssize(all) < share_.batch_size) {
      std::optional<StreamItem> item = stream_->next();
      if (!item) is_at_end_ = true;
      if (item) all.push_back(*std::move(item));
    }
    if (drop_last_ && std::ssize(all) < share_.batch_size) return {};
    if (all.empty()) return {};
    Planned planned{.num_samples = std::ssize(all), .stream_state = stream_->state()};
    const int64_t end = position_ + planned.num_samples;
    for (const int64_t position : data::positions_of(share_, position_, end)) {
      planned.items.push_back(all[static_cast<size_t>(position - position_)]);
    }
    if (planned.items.empty()) {
      planned.items.push_back(all.front());
      planned.is_own = false;
    }
    position_ = end;
    return planned;
  }

  const std::shared_ptr<SampleStream> stream_;  // shared with the loader
  const data::BatchShare share_;
  int64_t position_;
  const bool drop_last_;
  const Collate collate_;
  const bool is_pinned_;

  std::mutex mutex_;  // guards position_, the stream and the members below; not held in make()
  bool is_at_end_ = false;
  int64_t num_planned_ = 0;
  std::map<int64_t, Planned> planned_;
  std::exception_ptr failure_;  // an error of the stream; only load_state() repairs it
};

StreamLoader::StreamLoader(StreamLoader&&) noexcept = default;
StreamLoader& StreamLoader::operator=(StreamLoader&&) noexcept = default;
StreamLoader::~StreamLoader() = default;

StreamLoader::StreamLoader(std::shared_ptr<SampleStream> stream, const StreamLoaderOptions& options)
    : stream_(std::move(stream)), options_(options), clock_(os::make_native_system()) {
  options_.ranks.reset();
  share_.split = options.split;
  share_.batch_size = options.batch_size;
  if (options.ranks) {
    const ProcessGroup& group = options.ranks->group_of_one_axis(kLoader, "dp");
    share_.rank = group.rank();
    share_.world_size = group.world_size();
    if (share_.world_size > 1) group_ = group;
  }
  const auto prepare = [&]() -> std::vector<AgreedField> {
    check_fetch_threads(kLoader, options.num_threads, options.prefetch);
    if (stream_ == nullptr || options.collate == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "StreamLoader: the stream or the collate is null; pass both");
    }
    options_.pin_memory = options.pin_memory && device::uses_pinned_memory();
    const std::optional<uint64_t> digest = stream_->digest();
    const auto number = [](auto value) { return cadre::format("{}", static_cast<int64_t>(value)); };
    return {{"batch_size", number(options.batch_size)},
            {"drop_last", number(options.drop_last)},
            {"split", number(options.split)},
            {"stream digest", digest ? cadre::format("{:016x}", *digest) : "none"}};
  };
  if (group_) {
    check_equal_on_all_ranks(*group_, kLoader, prepare,
                             "all ranks need the same batch_size, drop_last, split and stream");
  } else {
    (void)prepare();
  }
  check_batch_size(options.batch_size, share_.world_size);
}

SampleStream& StreamLoader::stream() const {
  if (stream_ == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "StreamLoader: this loader was moved from; use the one that it was moved into");
  }
  return *stream_;
}

SampleStream& StreamLoader::free_stream() const {
  if (is_stuck_) {
    throw Error(ErrorCode::kTimeout,
                "StreamLoader: a thread that has not returned within the timeout still uses the "
                "stream; make another loader with another stream");
  }
  return stream();
}

StreamLoader::Epoch StreamLoader::epoch(int64_t epoch) {
  (void)stream();
  if (epoch < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("StreamLoader: the epoch is {}; expected 0 or more", epoch));
  }
  end_loops();
  if (!is_positioned_ || position_.epoch != epoch) {
    position_ = {.epoch = epoch, .samples = 0};
    stream_state_.reset();
  }
  is_positioned_ = false;
  return Epoch(this, loops_.begin_epoch());
}

// The threads have finished when prefetch_ is destroyed, so the stream may be moved afterwards.
void StreamLoader::end_loops() {
  (void)loops_.begin_epoch();
  prefetch_.reset();
  reader_.reset();
}

std::shared_ptr<const data::LoopToken> StreamLoader::begin_loop(
    const std::shared_ptr<const data::LoopToken>& epoch) {
  (void)stream();
  return loops_.begin_loop(epoch);
}

bool StreamLoader::next(Batch& batch, const std::shared_ptr<const data::LoopToken>& loop) {
  (void)stream();
  loops_.check(loop);
  Fetched fetched;
  try {
    fetched = fetch_on_all_ranks();
  } catch (...) {
    // The next request of any rank begins again at the position, at which all ranks still are.
    prefetch_.reset();
    reader_.reset();
    throw;
  }
  if (fetched.num_samples == 0) {
    prefetch_.reset();
    reader_.reset();
    return false;
  }
  batch = std::move(fetched.batch);
  position_.samples += fetched.num_samples;
  stream_state_ = std::move(fetched.stream_state);
  return true;
}

StreamLoader::Fetched StreamLoader::fetch_on_all_ranks() {
  if (!group_) return fetch();
  Fetched fetched;
  check_equal(gather_words(*group_, kLoader, 2, [&]() -> std::vector<int64_t> {
    fetched = fetch();
    return {fetched.num_samples, static_cast<int64_t>(fnv1a(fetched.stream_state))};
  }));
  return fetched;
}

void StreamLoader::check_equal(const std::vector<std::vector<int64_t>>& words) const {
  for (size_t rank = 1; rank < words.size(); ++rank) {
    if (words[rank] == words[0]) continue;
    const auto text = [&](size_t of_rank) {
      return cadre::format("{} samples and then has the state {:016x}", words[of_rank][0],
                           static_cast<uint64_t>(words[of_rank][1]));
    };
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("StreamLoader: the streams of the ranks differ: after sample {} of "
                              "epoch {}, rank 0 reads {}, and rank {} reads {}; all ranks need the "
                              "same source and settings",
                              position_.samples, position_.epoch, text(0), rank, text(rank)));
  }
}

StreamLoader::Fetched StreamLoader::fetch() {
  const TimePoint begin = clock_->now();
  if (reader_ == nullptr) {
    SampleStream& stream = free_stream();
    if (stream_state_) {
      stream.load_state(*stream_state_);
    } else {
      stream.start(position_.epoch);
    }
    reader_ = std::make_shared<Reader>(stream_, share_, position_, options_);
    num_fetched_ = 0;
  }
  Fetched fetched;
  if (options_.num_threads == 0) {
    fetched = reader_->fetch(num_fetched_++);
  } else {
    fetched = fetch_from_threads();
  }
  data_wait_ += clock_->now() - begin;
  return fetched;
}

StreamLoader::Fetched StreamLoader::fetch_from_threads() {
  if (prefetch_ == nullptr) {
    const int64_t threads = options_.num_threads;
    const auto depth_of = [&](int64_t prefetch) {
      return std::min(prefetch, kMaxPrefetch) * threads;
    };
    prefetch_ = std::make_unique<Prefetch>(
        std::numeric_limits<int64_t>::max(),
        [reader = reader_](int64_t index) { return reader->fetch(index); },
        PrefetchOptions{.num_threads = options_.num_threads,
                        .depth = depth_of(options_.prefetch),
                        .max_depth = depth_of(options_.max_prefetch),
                        .timeout = options_.timeout});
  }
  try {
    return prefetch_->items.next();
  } catch (...) {
    is_stuck_ = end_failed_fetch(prefetch_);
    throw;
  }
}

std::string StreamLoader::state() const {
  StateWriter out(kLoader, stream().digest().value_or(0));
  return out.number(position_.epoch)
      .number(position_.samples)
      .number(stream_state_ ? 1 : 0)
      .text(stream_state_.value_or(""))
      .bytes();
}

void StreamLoader::load_state(std::string_view state) {
  (void)stream();
  end_loops();
  LoaderPosition loaded;
  std::optional<std::string> of_stream;
  const auto load = [&]() -> std::vector<AgreedField> {
    SampleStream& stream = free_stream();
    StateReader in(state, kLoader, stream.digest().value_or(0));
    loaded.epoch = in.number("epoch", std::numeric_limits<int64_t>::max());
    loaded.samples = in.number("number of samples", std::numeric_limits<int64_t>::max());
    const bool has_state = in.number("mark of a state", 1) == 1;
    const std::string_view text = in.text("state of the stream");
    in.end();
    if (has_state) {
      of_stream = text;
      stream.load_state(text);
    }
    return {{"state", cadre::format("{:016x}", fnv1a(state))}};
  };
  if (group_) {
    check_equal_on_all_ranks(*group_, "StreamLoader::load_state", load,
                             "load the same state on all ranks");
  } else {
    (void)load();
  }
  position_ = loaded;
  stream_state_ = std::move(of_stream);
  is_positioned_ = true;
}

}  // namespace cadre
