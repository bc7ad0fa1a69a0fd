// A stream for the tests of streams.
//
// For tests only.
#pragma once

#include <ATen/ops/scalar_tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/train/data/streams/sample_stream.h"

namespace cadre::testing {

struct CountingStreamOptions {
  int64_t num_samples = 0;
  int64_t first = 0;          // the value of the first sample
  int64_t step_of_epoch = 0;  // is added to each value, times the epoch
  std::optional<uint64_t> digest = {};
  std::function<void(int64_t index)> before = {};  // called before a sample is returned
};

// A stream in which each sample is a number.
class CountingStream : public SampleStream {
 public:
  explicit CountingStream(const CountingStreamOptions& options) : options_(options) {}

  void start(int64_t epoch) override {
    epoch_ = epoch;
    index_ = 0;
  }
  std::optional<StreamItem> next() override {
    if (index_ >= options_.num_samples) return std::nullopt;
    if (options_.before) options_.before(index_);
    const int64_t value = options_.first + options_.step_of_epoch * epoch_ + index_++;
    return StreamItem([value] {
      return Sample{.data = at::scalar_tensor(value, at::kLong),
                    .target = at::scalar_tensor(-value, at::kLong)};
    });
  }
  std::string state() const override {
    return std::to_string(epoch_) + " " + std::to_string(index_);
  }
  void load_state(std::string_view state) override {
    const size_t space = state.find(' ');
    if (space == std::string_view::npos || space > 18 || state.size() > 38 ||
        state.find_first_not_of("0123456789 ") != std::string_view::npos || space == 0 ||
        state.find(' ', space + 1) != std::string_view::npos || space + 1 == state.size()) {
      throw Error(ErrorCode::kCorruption, "CountingStream: the state is damaged");
    }
    epoch_ = std::stoll(std::string(state.substr(0, space)));
    index_ = std::stoll(std::string(state.substr(space + 1)));
  }
  std::optional<uint64_t> digest() const override { return options_.digest; }

 private:
  CountingStreamOptions options_;
  int64_t epoch_ = 0;
  int64_t index_ = 0;
};

inline std::shared_ptr<SampleStream> counting_stream(const CountingStreamOptions& options) {
  return std::make_shared<CountingStream>(options);
}

// Returns the values of at most `limit` further samples.
inline std::vector<int64_t> read_values(SampleStream& stream, int64_t limit = 1 << 20) {
  std::vector<int64_t> values;
  while (std::ssize(values) < limit) {
    const std::optional<StreamItem> item = stream.next();
    if (!item) break;
    values.push_back(item->make().data.item<int64_t>());
  }
  return values;
}

inline std::vector<int64_t> values_of_epoch(SampleStream& stream, int64_t epoch,
                                            int64_t limit = 1 << 20) {
  stream.start(epoch);
  return read_values(stream, limit);
}

}  // namespace cadre::testing
