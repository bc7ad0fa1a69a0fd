#include "cadre/train/data/samplers/samplers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/data_loader.h"

namespace cadre {
namespace {

using Order = std::vector<int64_t>;

Order all_of(const Sampler& sampler, int64_t epoch) {
  const EpochOrder order = sampler.order(epoch);
  Order all;
  for (int64_t i = 0; i < sampler.size(); ++i) all.push_back(order(i));
  return all;
}

// The expected values are those of torch.utils.data.WeightedRandomSampler of torch 2.13 with
// generators that are seeded with 3, 4 and 12.
TEST(WeightedRandomSampler, DrawsAsPythonDoes) {
  const std::vector<double> weights = {0.5, 0.0, 3.0, 1.25, 2.0, 0.1};
  const WeightedRandomSampler with(weights, {.num_samples = 10, .seed = 3});
  EXPECT_EQ(all_of(with, 0), (Order{0, 2, 4, 2, 4, 3, 2, 2, 2, 4}));
  EXPECT_EQ(all_of(with, 1), (Order{2, 4, 0, 4, 4, 3, 2, 4, 2, 2}));
  const WeightedRandomSampler without(weights, {.num_samples = 4, .replacement = false, .seed = 3});
  EXPECT_EQ(all_of(without, 0), (Order{0, 3, 2, 4}));
  const WeightedRandomSampler five(weights, {.num_samples = 5, .replacement = false, .seed = 5});
  EXPECT_EQ(all_of(five, 7), (Order{3, 2, 4, 0, 5}));
}

TEST(WeightedRandomSampler, DrawsInProportion) {
  const WeightedRandomSampler sampler({1, 0, 2, 5}, {.num_samples = 80000});
  std::vector<int64_t> counts(4);
  for (const int64_t sample : all_of(sampler, 0)) ++counts[static_cast<size_t>(sample)];
  EXPECT_EQ(counts[1], 0);
  EXPECT_NEAR(static_cast<double>(counts[0]), 10000, 400);
  EXPECT_NEAR(static_cast<double>(counts[2]), 20000, 500);
  EXPECT_NEAR(static_cast<double>(counts[3]), 50000, 600);
}

// The expected values are those of get_length_grouped_indices() of Hugging Face's transformers with
// generators of torch 2.13 that are seeded with 5, 6 and 0.
TEST(LengthGroupedSampler, HasTheOrderOfTransformers) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 26; ++i) lengths.push_back(i * 7919 % 31);
  EXPECT_EQ(all_of(LengthGroupedSampler(lengths, {.batch_size = 3, .seed = 5}), 0),
            (Order{11, 6,  1, 12, 23, 9, 15, 13, 17, 8,  14, 18, 22,
                   4,  19, 3, 20, 0,  2, 24, 10, 21, 25, 7,  5,  16}));
  EXPECT_EQ(
      all_of(LengthGroupedSampler(lengths, {.batch_size = 2, .num_sorted_batches = 2, .seed = 2}),
             4),
      (Order{11, 23, 5, 0,  2, 13, 16, 20, 15, 19, 21, 18, 12,
             6,  3,  9, 22, 4, 10, 25, 17, 8,  1,  7,  24, 14}));
  EXPECT_EQ(all_of(LengthGroupedSampler(lengths, {.batch_size = 64}), 0),
            (Order{11, 22, 2,  13, 24, 4,  15, 6,  17, 8,  19, 10, 21,
                   1,  12, 23, 3,  14, 25, 5,  16, 7,  18, 9,  20, 0}));
}

TEST(LengthGroupedSampler, BatchesHaveSimilarLengths) {
  Random random(3);
  std::vector<int64_t> lengths;
  for (int i = 0; i < 4000; ++i) lengths.push_back(static_cast<int64_t>(random.below(500)));
  const LengthGroupedSampler sampler(lengths, {.batch_size = 16});
  Order order = all_of(sampler, 2);
  const auto padded = [&](const Order& samples) {
    int64_t total = 0;
    for (size_t begin = 0; begin < samples.size(); begin += 16) {
      int64_t longest = 0;
      for (size_t i = begin; i < begin + 16; ++i) {
        longest = std::max(longest, lengths[static_cast<size_t>(samples[i])]);
      }
      for (size_t i = begin; i < begin + 16; ++i) {
        total += longest - lengths[static_cast<size_t>(samples[i])];
      }
    }
    return total;
  };
  Order shuffled = all_of(KeyedSampler(4000, 1), 0);
  EXPECT_LT(padded(order) * 10, padded(shuffled));
  std::ranges::sort(order);
  for (int64_t i = 0; i < 4000; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(KeyedSampler, AnEpochOfManySamplesNeedsNoMemory) {
  const int64_t num_samples = 1'000'000'000'000;
  const EpochOrder order = KeyedSampler(num_samples, 1).order(0);
  const EpochOrder next = KeyedSampler(num_samples, 1).order(1);
  EXPECT_NE(order(0), next(0));
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_GE(order(i), 0);
    EXPECT_LT(order(num_samples - 1 - i), num_samples);
  }
  EXPECT_EQ(all_of(KeyedSampler(0, 1), 0), Order{});
}

// Reads batches of one epoch on several ranks, from a position; returns all samples in order.
Order samples_from(int world_size, const std::shared_ptr<const Sampler>& sampler, int64_t size,
                   LoaderPosition& position, int64_t max_batches, int num_threads) {
  std::vector<std::vector<Order>> by_rank(static_cast<size_t>(world_size));
  const LoaderPosition begin = position;
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& world) {
    DataLoader loader =
        make_data_loader(testing::Counting(size), {.batch_size = 6,
                                                   .ranks = world,
                                                   .split = BatchSplit::kConsecutive,
                                                   .sampler = sampler,
                                                   .num_threads = num_threads});
    loader.seek(begin);
    auto& batches = by_rank[static_cast<size_t>(world.rank())];
    for (const Batch& batch : loader.epoch(begin.epoch)) {
      const auto* first = batch.data.const_data_ptr<int64_t>();
      batches.emplace_back(first, first + batch.data.numel());
      if (std::ssize(batches) == max_batches) break;
    }
    if (world.rank() == 0) position = loader.position();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  Order all;
  for (size_t k = 0; k < by_rank[0].size(); ++k) {
    for (const auto& batches : by_rank) {
      all.insert(all.end(), batches[k].begin(), batches[k].end());
    }
  }
  return all;
}

TEST(Sampler, ARunContinuesOnAnyNumberOfRanks) {
  std::vector<double> weights;
  std::vector<int64_t> lengths;
  for (int i = 0; i < 47; ++i) {
    weights.push_back(1 + i % 5);
    lengths.push_back(i * 37 % 11);
  }
  const std::vector<std::shared_ptr<const Sampler>> samplers = {
      std::make_shared<KeyedSampler>(47, 3),
      std::make_shared<WeightedRandomSampler>(weights,
                                              WeightedRandomSamplerOptions{.num_samples = 31}),
      std::make_shared<LengthGroupedSampler>(lengths,
                                             LengthGroupedSamplerOptions{.batch_size = 6})};
  for (const auto& sampler : samplers) {
    LoaderPosition position = {.epoch = 2, .samples = 0};
    Order seen;
    for (const auto& [world_size, num_batches] :
         {std::pair{1, int64_t{1}}, {3, int64_t{2}}, {4, int64_t{1}}, {2, int64_t{100}}}) {
      const Order part =
          samples_from(world_size, sampler, 47, position, num_batches, world_size - 1);
      seen.insert(seen.end(), part.begin(), part.end());
    }
    EXPECT_EQ(seen, all_of(*sampler, 2));
  }
}

TEST(Sampler, SamplersThatDifferAreRefusedOnAllRanks) {
  std::vector<std::string> messages(2, "accepted");
  const auto result = testing::run_groups(2, [&](const ProcessGroup& world) {
    try {
      (void)make_data_loader(testing::Counting(9),
                             {.batch_size = 2,
                              .ranks = world,
                              .sampler = std::make_shared<KeyedSampler>(9, world.rank())});
    } catch (const Error& error) {
      messages[static_cast<size_t>(world.rank())] = error.message();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(messages, ::testing::Each(::testing::HasSubstr("sampler digest is")));
}

// A sampler that returns a sample that does not exist.
class Wild : public KeyedSampler {
 public:
  Wild() : KeyedSampler(9, 0) {}
  EpochOrder order(int64_t) const override {
    return [](int64_t position) { return position == 5 ? 9 : position; };
  }
};

TEST(Sampler, ItsSamplesAndOptionsAreChecked) {
  DataLoader loader = make_data_loader(testing::Counting(9),
                                       {.batch_size = 3, .sampler = std::make_shared<Wild>()});
  int64_t num_batches = 0;
  try {
    for (const Batch& batch : loader.epoch(0)) num_batches += batch.data.size(0) / 3;
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("sample 9 for position 5"));
  }
  EXPECT_EQ(num_batches, 1);
  EXPECT_THROW(make_data_loader(
                   testing::Counting(9),
                   {.batch_size = 3, .seed = 1, .sampler = std::make_shared<KeyedSampler>(9, 0)}),
               Error);
}

TEST(Sampler, RefusesWhatCannotBe) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& weights :
       {std::vector<double>{}, {0, 0}, {1, -1}, {1, nan}, {inf}, {1e308, 1e308}}) {
    EXPECT_THROW(WeightedRandomSampler(weights, {.num_samples = 1}), Error);
  }
  EXPECT_THROW(WeightedRandomSampler({1, 1}, {.num_samples = 0}), Error);
  EXPECT_THROW(WeightedRandomSampler({1, 0, 1}, {.num_samples = 3, .replacement = false}), Error);
  EXPECT_THROW(LengthGroupedSampler({1, -1}, {}), Error);
  EXPECT_THROW(LengthGroupedSampler({1}, {.batch_size = 0}), Error);
  EXPECT_THROW(LengthGroupedSampler({1}, {.num_sorted_batches = 0}), Error);
  EXPECT_THROW(KeyedSampler(-1, 0), Error);
  EXPECT_EQ(all_of(LengthGroupedSampler({}, {}), 0), Order{});
}

}  // namespace
}  // namespace cadre
