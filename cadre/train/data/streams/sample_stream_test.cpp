// Tests the streams that are made of others: map, shuffle, interleave and datasets.
#include "cadre/train/data/streams/sample_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "cadre/core/base/random.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/counting_stream.h"
#include "cadre/train/data/samplers/keyed_permutation.h"

namespace cadre {
namespace {

using testing::counting_stream;
using testing::read_values;
using testing::values_of_epoch;

using Numbers = std::vector<int64_t>;

Numbers counted(int64_t first, int64_t count) {
  Numbers numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "accepted";
}

TEST(ShuffleStream, PermutesEachBlockByAKey) {
  for (const int64_t num_samples : {0, 1, 9, 10, 11, 45}) {
    const auto shuffled = shuffle_stream(counting_stream({.num_samples = num_samples}),
                                         {.buffer_size = 10, .seed = 3});
    const Numbers first = values_of_epoch(*shuffled, 0);
    ASSERT_EQ(std::ssize(first), num_samples);
    for (int64_t begin = 0; begin < num_samples; begin += 10) {
      Numbers block(first.begin() + begin, first.begin() + std::min(begin + 10, num_samples));
      std::ranges::sort(block);
      EXPECT_EQ(block, counted(begin, std::ssize(block)));
    }
    EXPECT_EQ(values_of_epoch(*shuffled, 0), first);
    if (num_samples < 45) continue;
    EXPECT_NE(values_of_epoch(*shuffled, 1), first);
    // The blocks of an epoch have different orders.
    Numbers as_first_block(first.begin(), first.begin() + 10);
    for (int64_t& value : as_first_block) value += 10;
    EXPECT_NE(as_first_block, Numbers(first.begin() + 10, first.begin() + 20));
    const auto other = shuffle_stream(counting_stream({.num_samples = num_samples}),
                                      {.buffer_size = 10, .seed = 4});
    EXPECT_NE(values_of_epoch(*other, 0), first);
  }
}

TEST(ShuffleStream, KeepsABufferOfSamplesAtMost) {
  int64_t num_read = 0;
  const auto shuffled =
      shuffle_stream(counting_stream({.num_samples = 1000,
                                      .before = [&](int64_t index) { num_read = index + 1; }}),
                     {.buffer_size = 16});
  shuffled->start(0);
  for (int64_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(shuffled->next().has_value());
    ASSERT_LE(num_read - i, 16);
  }
  EXPECT_LT(shuffled->state().size(), 200);
}

TEST(InterleaveStreams, EachSampleComesOnceInTheOrderOfItsStream) {
  const auto mixed = interleave_streams(
      {{.stream = counting_stream({.num_samples = 500}), .weight = 5},
       {.stream = counting_stream({.num_samples = 300, .first = 1000}), .weight = 3},
       {.stream = counting_stream({.num_samples = 400, .first = 2000}), .weight = 2}},
      {.seed = 1});
  const Numbers all = values_of_epoch(*mixed, 0);
  ASSERT_EQ(all.size(), 1200);
  std::vector<Numbers> of_source(3);
  for (const int64_t value : all) of_source[static_cast<size_t>(value / 1000)].push_back(value);
  EXPECT_EQ(of_source[0], counted(0, 500));
  EXPECT_EQ(of_source[1], counted(1000, 300));
  EXPECT_EQ(of_source[2], counted(2000, 400));
  // The streams' shares of the first 600 are 0.5, 0.3 and 0.2, within four deviations.
  for (const auto& [source, share] : {std::pair{0, 0.5}, {1, 0.3}, {2, 0.2}}) {
    const auto count = std::count_if(all.begin(), all.begin() + 600,
                                     [&](int64_t value) { return value / 1000 == source; });
    EXPECT_NEAR(static_cast<double>(count), 600 * share, 4 * std::sqrt(600 * share * (1 - share)));
  }
  EXPECT_NE(values_of_epoch(*mixed, 1), all);
}

// The reference draws the stream of sample i from the key alone.
TEST(InterleaveStreams, TheStreamOfASampleDependsOnSeedAndIndexOnly) {
  for (const int64_t length : {200, 5000}) {
    const auto mixed = interleave_streams(
        {{.stream = counting_stream({.num_samples = length}), .weight = 1},
         {.stream = counting_stream({.num_samples = length, .first = 10000}), .weight = 3}},
        {.seed = 9});
    const Numbers all = values_of_epoch(*mixed, 2, 200);
    for (size_t i = 0; i < all.size(); ++i) {
      Random keys = keyed_random(9, 2, i);
      ASSERT_EQ(all[i] < 10000, keys.unit() < 0.25) << "sample " << i;
    }
  }
}

TEST(InterleaveStreams, EndsAsItIsTold) {
  const auto mixed = [](StreamEnd end) {
    return interleave_streams(
        {{.stream = counting_stream({.num_samples = 3, .step_of_epoch = 100})},
         {.stream = counting_stream({.num_samples = 40, .first = 1000})}},
        {.seed = 5, .end = end});
  };
  const Numbers all = values_of_epoch(*mixed(StreamEnd::kAllExhausted), 0);
  const Numbers until_first = values_of_epoch(*mixed(StreamEnd::kFirstExhausted), 0);
  const Numbers restarted = values_of_epoch(*mixed(StreamEnd::kRestart), 0, 500);
  EXPECT_EQ(all.size(), 43);
  ASSERT_GE(until_first.size(), 3);
  EXPECT_LT(until_first.size(), 43);
  // The three are equal up to the first end; then the next sample of stream 0 is that of a new
  // pass.
  EXPECT_TRUE(std::equal(until_first.begin(), until_first.end(), all.begin()));
  EXPECT_TRUE(std::equal(until_first.begin(), until_first.end(), restarted.begin()));
  EXPECT_EQ(restarted[until_first.size()], 100);
  ASSERT_EQ(restarted.size(), 500);
  const auto of_second =
      std::ranges::count_if(restarted, [](int64_t v) { return v >= 1000 && v < 1040; });
  EXPECT_NEAR(static_cast<double>(of_second), 250 + 100, 150);
  const auto empty = interleave_streams({{.stream = counting_stream({.num_samples = 0})}},
                                        {.end = StreamEnd::kRestart});
  EXPECT_THAT(error_text([&] { values_of_epoch(*empty, 0); }),
              ::testing::HasSubstr("stream 0 of 1 has no samples in pass 1"));
  const auto none = interleave_streams({{.stream = counting_stream({.num_samples = 0})}});
  EXPECT_TRUE(values_of_epoch(*none, 0).empty());
}

TEST(StreamDataset, ReturnsEachSampleOnceInAKeyedOrder) {
  const auto dataset = std::make_shared<const testing::Counting>(257);
  const auto stream = stream_dataset(dataset, {.seed = 2});
  Numbers first = values_of_epoch(*stream, 0);
  EXPECT_NE(first, values_of_epoch(*stream, 1));
  EXPECT_EQ(first, values_of_epoch(*stream, 0));
  EXPECT_FALSE(std::ranges::is_sorted(first));
  std::ranges::sort(first);
  EXPECT_EQ(first, counted(0, 257));
  EXPECT_EQ(values_of_epoch(*stream_dataset(dataset, {.shuffle = false}), 0), counted(0, 257));
}

TEST(MapStream, TransformsASampleWhenItIsMade) {
  int64_t num_transformed = 0;
  const auto doubled =
      map_stream(counting_stream({.num_samples = 4}), [&num_transformed](Sample sample) {
        ++num_transformed;
        return Sample{.data = sample.data.mul(2), .target = sample.target};
      });
  doubled->start(0);
  const std::optional<StreamItem> unused = doubled->next();
  EXPECT_EQ(num_transformed, 0);
  EXPECT_EQ(read_values(*doubled), (Numbers{2, 4, 6}));
  EXPECT_EQ(num_transformed, 3);
}

// A stream of all kinds, of which the parts end at different places.
std::shared_ptr<SampleStream> composed(Random& random) {
  const auto number = [&](uint64_t low, uint64_t high) {
    return static_cast<int64_t>(low + random.below(high - low + 1));
  };
  std::vector<WeightedStream> parts;
  const int64_t num_parts = number(1, 4);
  for (int64_t i = 0; i < num_parts; ++i) {
    std::shared_ptr<SampleStream> part;
    const int64_t size = number(0, 60);
    if (random.below(2) == 0) {
      part = stream_dataset(std::make_shared<const testing::Counting>(size),
                            {.shuffle = random.below(2) == 0, .seed = number(0, 9)});
      part = map_stream(part, [offset = i * 1000](const Sample& sample) {
        return Sample{.data = sample.data.add(offset), .target = sample.target};
      });
    } else {
      part = counting_stream({.num_samples = size, .first = i * 1000});
    }
    if (random.below(2) == 0) {
      part = shuffle_stream(part, {.buffer_size = number(1, 12), .seed = number(0, 9)});
    }
    parts.push_back({.stream = part, .weight = 0.1 + random.unit()});
  }
  const auto end = random.below(3) == 0 ? StreamEnd::kFirstExhausted : StreamEnd::kAllExhausted;
  auto mixed = interleave_streams(parts, {.seed = number(0, 9), .end = end});
  if (random.below(2) == 0) return mixed;
  return shuffle_stream(mixed, {.buffer_size = number(1, 20), .seed = number(0, 9)});
}

TEST(SampleStream, AStateContinuesExactlyWhereItWasTaken) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const auto stream = composed(random);
    const auto epoch = static_cast<int64_t>(random.below(4));
    const Numbers all = values_of_epoch(*stream, epoch);
    EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), all.size());
    stream->start(epoch);
    const auto stop = static_cast<int64_t>(random.below(all.size() + 1));
    (void)read_values(*stream, stop);
    const std::string state = stream->state();
    const Numbers rest(all.begin() + stop, all.end());
    EXPECT_EQ(read_values(*stream), rest) << "seed " << seed;
    Random again(seed);
    const auto resumed = composed(again);
    resumed->load_state(state);
    EXPECT_EQ(resumed->state(), state) << "seed " << seed;
    EXPECT_EQ(read_values(*resumed), rest) << "seed " << seed << " at " << stop;
    // A stream that was read further goes back.
    resumed->load_state(state);
    EXPECT_EQ(read_values(*resumed), rest) << "seed " << seed;
  }
}

TEST(SampleStream, DamagedStatesAreRefused) {
  Random random(4);
  const auto make = [] {
    return shuffle_stream(
        interleave_streams(
            {{.stream = counting_stream({.num_samples = 30})},
             {.stream = stream_dataset(std::make_shared<const testing::Counting>(20))}}),
        {.buffer_size = 8});
  };
  const auto stream = make();
  stream->start(1);
  (void)read_values(*stream, 13);
  const std::string state = stream->state();
  for (size_t size = 0; size < state.size(); ++size) {
    EXPECT_THROW(make()->load_state(state.substr(0, size)), Error) << size << " bytes";
  }
  EXPECT_THROW(make()->load_state(state + "x"), Error);
  for (int attempt = 0; attempt < 2000; ++attempt) {
    std::string damaged = state;
    const size_t at = random.below(damaged.size());
    damaged[at] = static_cast<char>(damaged[at] ^ static_cast<char>(1 + random.below(255)));
    try {
      const auto loaded = make();
      loaded->load_state(damaged);
      (void)read_values(*loaded, 100);  // a state that is valid by chance
    } catch (const Error&) {
    }
  }
  EXPECT_THAT(error_text([&] { make()->load_state("abc"); }),
              ::testing::HasSubstr("shuffle_stream: the state is damaged"));
}

TEST(SampleStream, AStateOfOtherSettingsIsRefused) {
  const auto make = [](double weight, int64_t seed, int64_t buffer) {
    return shuffle_stream(
        interleave_streams({{.stream = counting_stream({.num_samples = 30}), .weight = weight},
                            {.stream = counting_stream({.num_samples = 30, .first = 100})}},
                           {.seed = seed}),
        {.buffer_size = buffer});
  };
  const auto stream = make(2, 1, 8);
  stream->start(0);
  (void)read_values(*stream, 10);
  const std::string state = stream->state();
  EXPECT_EQ(error_text([&] { make(2, 1, 8)->load_state(state); }), "accepted");
  for (const auto& other : {make(3, 1, 8), make(2, 2, 8), make(2, 1, 9)}) {
    EXPECT_THAT(error_text([&] { other->load_state(state); }),
                ::testing::HasSubstr("was saved with other settings or another source"));
  }
}

TEST(SampleStream, RefusesWhatCannotBe) {
  const auto one = [] { return counting_stream({.num_samples = 1}); };
  EXPECT_THROW(shuffle_stream(nullptr), Error);
  EXPECT_THROW(shuffle_stream(one(), {.buffer_size = 0}), Error);
  EXPECT_THROW(map_stream(nullptr, [](const Sample& sample) { return sample; }), Error);
  EXPECT_THROW(map_stream(one(), nullptr), Error);
  EXPECT_THROW(stream_dataset(nullptr), Error);
  EXPECT_THROW(interleave_streams({}), Error);
  EXPECT_THROW(interleave_streams({{.stream = nullptr}}), Error);
  for (const double weight : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(interleave_streams({{.stream = one(), .weight = weight}}), Error);
  }
  EXPECT_THROW(
      interleave_streams({{.stream = one(), .weight = 1e308}, {.stream = one(), .weight = 1e308}}),
      Error);
  const auto shared = one();
  EXPECT_THAT(error_text([&] {
                interleave_streams({{.stream = shared}, {.stream = shared}});
              }),
              ::testing::HasSubstr("stream 1 is the same object"));
}

}  // namespace
}  // namespace cadre
