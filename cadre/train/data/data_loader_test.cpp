#include "cadre/train/data/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/distributed_sampler.h"
#include "cadre/train/data/synthetic_dataset.h"

namespace cadre {
namespace {

using testing::Counting;

using Indices = std::vector<int64_t>;

constexpr SyntheticRegressionOptions kNine = {.num_samples = 9, .num_inputs = 2};

Indices values(const at::Tensor& tensor) {
  const auto* first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

std::vector<Indices> batches_of(DataLoader& loader, int64_t epoch) {
  std::vector<Indices> batches;
  for (const auto& [data, target] : loader.epoch(epoch)) batches.push_back(values(data));
  return batches;
}

// Returns the batches of each rank of a group of threads, from a loader over num_samples indices.
std::vector<std::vector<Indices>> batches_by_rank(int world_size, int64_t num_samples,
                                                  DataLoaderOptions options, int64_t epoch) {
  std::vector<std::vector<Indices>> by_rank(static_cast<size_t>(world_size));
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& world) {
    DataLoaderOptions own = options;
    own.ranks = world;
    DataLoader loader = make_data_loader(Counting(num_samples), own);
    by_rank[static_cast<size_t>(world.rank())] = batches_of(loader, epoch);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return by_rank;
}

TEST(DataLoader, BatchesHaveTheSameSamplesOnAnyNumberOfRanks) {
  const int64_t num_samples = 103;
  for (const int64_t batch_size : {25, 48}) {
    DataLoader whole = make_data_loader(Counting(num_samples), {.batch_size = batch_size});
    const std::vector<Indices> expected = batches_of(whole, 3);
    ASSERT_EQ(static_cast<int64_t>(expected.size()), whole.batches_per_epoch());
    for (const int world_size : {2, 3, 4}) {
      std::vector<Indices> united(expected.size());
      for (const auto& shares :
           batches_by_rank(world_size, num_samples, {.batch_size = batch_size}, 3)) {
        ASSERT_EQ(shares.size(), expected.size());
        for (size_t k = 0; k < shares.size(); ++k) {
          const size_t even = expected[k].size() / static_cast<size_t>(world_size);
          EXPECT_GE(shares[k].size(), even);
          EXPECT_LE(shares[k].size(), even + 1);
          united[k].insert(united[k].end(), shares[k].begin(), shares[k].end());
        }
      }
      for (size_t k = 0; k < expected.size(); ++k) {
        EXPECT_TRUE(std::ranges::is_permutation(united[k], expected[k])) << "batch " << k;
      }
    }
  }
}

TEST(DataLoader, ARanksSamplesAreThoseOfTheSampler) {
  const auto by_rank = batches_by_rank(3, 96, {.batch_size = 25, .seed = 5}, 1);
  for (int rank = 0; rank < 3; ++rank) {
    Indices seen;
    for (const Indices& batch : by_rank[static_cast<size_t>(rank)]) {
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
    const DistributedSampler sampler({.num_samples = 96, .rank = rank, .world_size = 3, .seed = 5});
    EXPECT_EQ(seen, sampler.indices(1)) << "rank " << rank;
  }
}

TEST(DataLoader, ConsecutivePartsInRankOrderAreTheBatch) {
  for (const int num_threads : {0, 2}) {
    const DataLoaderOptions options = {
        .batch_size = 25, .seed = 5, .split = BatchSplit::kConsecutive, .num_threads = num_threads};
    DataLoader whole = make_data_loader(Counting(103), options);
    const std::vector<Indices> expected = batches_of(whole, 1);
    const auto by_rank = batches_by_rank(3, 103, options, 1);
    for (const std::vector<Indices>& batches : by_rank) ASSERT_EQ(batches.size(), expected.size());
    for (size_t k = 0; k < expected.size(); ++k) {
      Indices joined;
      for (const std::vector<Indices>& batches : by_rank) {
        EXPECT_NEAR(batches[k].size(), expected[k].size() / 3.0, 1);
        joined.insert(joined.end(), batches[k].begin(), batches[k].end());
      }
      EXPECT_EQ(joined, expected[k]) << "batch " << k;
    }
  }
}

TEST(DataLoader, AShortLastBatchMayLeaveARankWithoutASample) {
  DataLoaderOptions options = {.batch_size = 4, .shuffle = false};
  EXPECT_EQ(batches_by_rank(4, 9, options, 0)[3], (std::vector<Indices>{{3}, {7}, {}}));
  options.drop_last = true;
  EXPECT_EQ(batches_by_rank(4, 9, options, 0)[3], (std::vector<Indices>{{3}, {7}}));
}

TEST(DataLoader, ItSplitsBatchesAmongTheRanksOfASubgroup) {
  std::vector<std::vector<Indices>> by_rank(4);
  const auto result = testing::run_groups(4, [&](const ProcessGroup& world) {
    const auto pair = world.split({.color = world.rank() / 2, .key = world.rank(), .name = {}});
    DataLoader loader =
        make_data_loader(Counting(4), {.batch_size = 2, .ranks = pair, .shuffle = false});
    by_rank[static_cast<size_t>(world.rank())] = batches_of(loader, 0);
    pair->close();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const std::vector<Indices> first = {{0}, {2}};
  const std::vector<Indices> second = {{1}, {3}};
  EXPECT_EQ(by_rank, (std::vector<std::vector<Indices>>{first, second, first, second}));
}

// Passes different options or a different dataset on rank 1 of 3, and returns the error of each
// rank.
std::vector<std::string> refusals(const DataLoaderOptions& options, const DataLoaderOptions& other,
                                  int64_t other_size = 60) {
  std::vector<std::string> messages(3, "accepted");
  const auto result = testing::run_groups(3, [&](const ProcessGroup& world) {
    const bool is_other = world.rank() == 1;
    DataLoaderOptions own = is_other ? other : options;
    own.ranks = world;
    try {
      (void)make_data_loader(Counting(is_other ? other_size : 60), own);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      messages[static_cast<size_t>(world.rank())] = error.message();
    }
    world.barrier();  // the error left the group usable
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return messages;
}

TEST(DataLoader, RanksWithDifferentOptionsAreRefusedAlike) {
  const DataLoaderOptions same = {.batch_size = 6, .seed = 1};
  const auto all_are = [](const std::string& difference) {
    return ::testing::Each("DataLoader on group \"world\": " + difference +
                           " on rank 1; all ranks need the same batch_size, seed, shuffle, "
                           "drop_last, split, sampler and dataset");
  };
  EXPECT_THAT(refusals(same, {.batch_size = 9, .seed = 1}),
              all_are("batch_size is 6 on rank 0 and 9"));
  EXPECT_THAT(refusals(same, {.batch_size = 6, .seed = 2}), all_are("seed is 1 on rank 0 and 2"));
  EXPECT_THAT(refusals(same, {.batch_size = 6, .seed = 1, .shuffle = false}),
              all_are("shuffle is 1 on rank 0 and 0"));
  EXPECT_THAT(refusals(same, {.batch_size = 6, .seed = 1, .drop_last = true}),
              all_are("drop_last is 0 on rank 0 and 1"));
  EXPECT_THAT(refusals(same, {.batch_size = 6, .seed = 1, .split = BatchSplit::kConsecutive}),
              all_are("split is 0 on rank 0 and 1"));
  EXPECT_THAT(refusals(same, same, 61), all_are("dataset size is 60 on rank 0 and 61"));
  EXPECT_THAT(refusals(same, {.batch_size = 6, .seed = 1, .num_threads = 1, .prefetch = 3}),
              ::testing::Each("accepted"));
  // Rank 1's batch_size of 1 is invalid by itself for 3 ranks; the message is still the comparison,
  // the same on all ranks.
  EXPECT_THAT(refusals(same, {.batch_size = 1, .seed = 1}),
              all_are("batch_size is 6 on rank 0 and 1"));
}

// Rank 1 of 3 makes the loader with the dataset `odd`, the others with a valid dataset of nine
// samples. Returns the errors of the ranks.
std::vector<std::string> refusals_with(const std::shared_ptr<const Dataset>& odd,
                                       const DataLoaderOptions& odd_options = {.batch_size = 3}) {
  std::vector<std::string> messages(3, "accepted");
  const auto result = testing::run_groups(3, [&](const ProcessGroup& world) {
    const bool is_odd = world.rank() == 1;
    DataLoaderOptions own = is_odd ? odd_options : DataLoaderOptions{.batch_size = 3};
    own.ranks = world;
    try {
      DataLoader(is_odd ? odd : std::make_shared<const SyntheticRegression>(kNine), own);
    } catch (const Error& error) {
      messages[static_cast<size_t>(world.rank())] = error.message();
    }
    world.barrier();  // the error left the group usable
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return messages;
}

// A dataset whose size() throws an object that is not a std::exception.
class Unreadable : public Counting {
 public:
  Unreadable() : Counting(9) {}
  int64_t size() const override { throw 7; }
};

TEST(DataLoader, ARefusalOfOneRankIsThrownOnAllRanks) {
  const auto all_have = [](const std::string& text) {
    return ::testing::Each(::testing::AllOf(::testing::HasSubstr(text),
                                            ::testing::HasSubstr("on rank 1 of 3 of group")));
  };
  EXPECT_THAT(refusals_with(nullptr), all_have("the dataset is null"));
  EXPECT_THAT(refusals_with(std::make_shared<const Counting>(-5)), all_have("size() is -5"));
  EXPECT_THAT(refusals_with(std::make_shared<const Unreadable>()), all_have("exception"));
  EXPECT_THAT(refusals_with(std::make_shared<const SyntheticRegression>(kNine),
                            {.batch_size = 3, .num_threads = -1}),
              all_have("num_threads is -1"));
}

TEST(DataLoader, OtherSamplesOfEqualNumberAreRefusedOnAllRanks) {
  SyntheticRegressionOptions other = kNine;
  other.seed = 1;
  EXPECT_THAT(refusals_with(std::make_shared<const SyntheticRegression>(other)),
              ::testing::Each(::testing::AllOf(::testing::HasSubstr("dataset digest is "),
                                               ::testing::HasSubstr("on rank 1; all ranks need"))));
  EXPECT_THAT(refusals_with(std::make_shared<const SyntheticRegression>(kNine)),
              ::testing::Each("accepted"));
}

TEST(DataLoader, AnotherOperationInItsPlaceIsRefusedOnAllRanks) {
  std::vector<std::string> messages(2, "accepted");
  const auto result = testing::run_groups(2, [&](const ProcessGroup& world) {
    try {
      if (world.rank() == 0) {
        (void)make_data_loader(Counting(9), {.batch_size = 2, .ranks = world});
      } else {
        // Equal in size to the message in which loaders compare their options.
        const std::vector<std::byte> bytes(128);
        std::vector<std::byte> all(256);
        world.communicator().all_gather(bytes, all, DType::kUint8);
      }
    } catch (const Error& error) {
      messages[static_cast<size_t>(world.rank())] = error.message();
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(messages[0],
              ::testing::HasSubstr("rank 0 is in DataLoader and rank 1 is in another operation"));
}

TEST(DataLoader, GoesOnFromAnyPosition) {
  const DataLoaderOptions options = {.batch_size = 10, .seed = 1};
  DataLoader loader = make_data_loader(Counting(45), options);
  std::vector<LoaderPosition> positions = {{2, 0}};
  std::vector<Indices> expected;
  for (const auto& [data, target] : loader.epoch(2)) {
    expected.push_back(values(data));
    positions.push_back(loader.position());
  }
  EXPECT_EQ(positions.back(), (LoaderPosition{2, 45}));
  for (size_t k = 0; k < positions.size(); ++k) {
    DataLoader resumed = make_data_loader(Counting(45), options);
    resumed.seek(positions[k]);
    const std::vector<Indices> rest(expected.begin() + static_cast<int64_t>(k), expected.end());
    EXPECT_EQ(batches_of(resumed, 2), rest);
    EXPECT_EQ(batches_of(resumed, 2), expected)
        << "only the first epoch() after a seek() starts at its position";
  }
}

TEST(DataLoader, ThreadsChangeNothingThatIsDelivered) {
  for (const bool drop_last : {false, true}) {
    const auto result = testing::run_groups(3, [&](const ProcessGroup& world) {
      const DataLoaderOptions plain = {
          .batch_size = 7, .ranks = world, .seed = 4, .drop_last = drop_last};
      DataLoaderOptions threaded = plain;
      threaded.num_threads = 3;
      DataLoader expected = make_data_loader(Counting(100), plain);
      DataLoader actual = make_data_loader(Counting(100), threaded);
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        EXPECT_EQ(batches_of(actual, epoch), batches_of(expected, epoch));
        EXPECT_EQ(actual.position(), expected.position());
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(DataLoader, ItsPositionCountsWhatWasDeliveredNotWhatWasFetched) {
  const DataLoaderOptions options = {.batch_size = 10, .num_threads = 2, .prefetch = 4};
  DataLoader loader = make_data_loader(Counting(100), options);
  std::vector<Indices> seen;
  for (const auto& [data, target] : loader.epoch(1)) {
    seen.push_back(values(data));
    if (seen.size() == 3) break;
  }
  EXPECT_EQ(loader.position(), (LoaderPosition{1, 30}));
  DataLoader moved = std::move(loader);
  moved.seek({1, 30});
  const std::vector<Indices> rest = batches_of(moved, 1);
  seen.insert(seen.end(), rest.begin(), rest.end());
  EXPECT_EQ(seen, batches_of(moved, 1));
}

// A dataset whose get() throws once, for one sample.
class Failing : public Counting {
 public:
  Failing() : Counting(20) {}
  Batch get(std::span<const int64_t> indices) const override {
    if (std::ranges::count(indices, 12) > 0 && !has_failed_.exchange(true)) {
      throw Error(ErrorCode::kUnavailable, "the disk is gone");
    }
    return Counting::get(indices);
  }

 private:
  mutable std::atomic<bool> has_failed_ = false;
};

TEST(DataLoader, AFailedBatchComesAtItsPlaceAndMayBeAskedForAgain) {
  for (const int num_threads : {0, 2}) {
    DataLoader loader(std::make_shared<const Failing>(),
                      {.batch_size = 5, .shuffle = false, .num_threads = num_threads});
    int64_t num_batches = 0;
    EXPECT_THROW(for (const auto& batch
                      : loader.epoch(0)) num_batches += batch.data.size(0) / 5,
                 Error);
    EXPECT_EQ(num_batches, 2);
    EXPECT_EQ(loader.position(), (LoaderPosition{0, 10}));
    loader.seek(loader.position());
    EXPECT_EQ(batches_of(loader, 0),
              (std::vector<Indices>{{10, 11, 12, 13, 14}, {15, 16, 17, 18, 19}}));
  }
}

// A dataset whose get() throws an object that is not a std::exception, for one sample.
class Throwing : public Counting {
 public:
  Throwing() : Counting(20) {}
  Batch get(std::span<const int64_t> indices) const override {
    if (std::ranges::count(indices, 12) > 0) throw 12;
    return Counting::get(indices);
  }
};

TEST(DataLoader, WhatIsNoExceptionComesAtItsPlaceToo) {
  for (const int num_threads : {0, 2}) {
    DataLoader loader(std::make_shared<const Throwing>(),
                      {.batch_size = 5, .shuffle = false, .num_threads = num_threads});
    EXPECT_THROW(batches_of(loader, 0), int);
    EXPECT_EQ(loader.position(), (LoaderPosition{0, 10}));
  }
}

// A dataset that changes after the loader was made: it has another size, returns fewer rows than
// requested, or returns no data.
class Changing : public Counting {
 public:
  Changing() : Counting(20) {}
  int64_t size() const override { return num_now; }
  Batch get(std::span<const int64_t> indices) const override {
    Batch batch = Counting::get(indices);
    if (num_missing > 0)
      batch.target = batch.target.narrow(0, 0, batch.target.size(0) - num_missing);
    if (has_no_data) batch.data.reset();
    return batch;
  }

  int64_t num_now = 20;
  int64_t num_missing = 0;
  bool has_no_data = false;
};

TEST(DataLoader, ADatasetThatChangesIsNamed) {
  const auto refusal = [](int num_threads, const std::function<void(Changing&)>& change) {
    auto dataset = std::make_shared<Changing>();
    DataLoader loader(dataset, {.batch_size = 5, .num_threads = num_threads});
    change(*dataset);
    try {
      batches_of(loader, 0);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("accepted");
  };
  for (const int num_threads : {0, 2}) {
    EXPECT_EQ(refusal(num_threads, [](Changing&) {}), "accepted");
    for (const int64_t size : {19, 21}) {
      EXPECT_THAT(refusal(num_threads, [&](Changing& one) { one.num_now = size; }),
                  ::testing::HasSubstr("the dataset had 20 samples when the loader was made"));
    }
    EXPECT_THAT(
        refusal(num_threads, [](Changing& one) { one.num_missing = 1; }),
        ::testing::HasSubstr("was asked for 5 samples and returned a tensor of 1 dimensions "
                             "with 4 rows"));
    EXPECT_THAT(refusal(num_threads, [](Changing& one) { one.has_no_data = true; }),
                ::testing::HasSubstr("a batch without data"));
  }
}

TEST(DataLoader, RefusesWhatCannotBe) {
  EXPECT_THROW(make_data_loader(Counting(9), {.num_threads = -1}), Error);
  EXPECT_THROW(make_data_loader(Counting(9), {.num_threads = 1, .prefetch = 0}), Error);
  const auto too_small = testing::run_groups(2, [](const ProcessGroup& world) {
    EXPECT_THROW(make_data_loader(Counting(9), {.batch_size = 1, .ranks = world}), Error);
  });
  EXPECT_TRUE(too_small.ok()) << too_small.failures();
  EXPECT_THROW(make_data_loader(Counting(9), {.batch_size = 10, .drop_last = true}), Error);
  EXPECT_THROW(make_data_loader(Counting(0), {.batch_size = 1}), Error);
  DataLoader loader = make_data_loader(Counting(9), {.batch_size = 1});
  EXPECT_THROW(loader.seek({.epoch = 0, .samples = 10}), Error);
}

// A dataset of which each batch takes 20 ms.
class Slow : public Counting {
 public:
  explicit Slow(std::shared_ptr<std::atomic<int>> num_fetched)
      : Counting(8), num_fetched_(std::move(num_fetched)) {}
  Batch get(std::span<const int64_t> indices) const override {
    const Deadline end = system_->deadline_in(std::chrono::milliseconds(20));
    const auto waiter = system_->make_waiter();
    while (!end.has_passed(system_->now())) waiter->park(end);
    ++*num_fetched_;
    return Counting::get(indices);
  }

 private:
  std::shared_ptr<os::System> system_ = os::make_native_system();  // shared by copies
  std::shared_ptr<std::atomic<int>> num_fetched_;                  // shared with the test
};

TEST(DataLoader, CountsTheTimeOfWaitingForData) {
  const auto num_fetched = std::make_shared<std::atomic<int>>(0);
  DataLoader slow = make_data_loader(Slow(num_fetched), {.batch_size = 2});
  EXPECT_EQ(slow.data_wait(), Duration{});
  batches_of(slow, 0);
  EXPECT_GE(slow.data_wait(), std::chrono::milliseconds(80));
  // Batches that are ready cost no wait.
  *num_fetched = 0;
  DataLoader ahead =
      make_data_loader(Slow(num_fetched), {.batch_size = 2, .num_threads = 1, .prefetch = 4});
  auto batch = ahead.epoch(0).begin();
  const Duration first = ahead.data_wait();
  EXPECT_GE(first, std::chrono::milliseconds(15));
  const auto system = os::make_native_system();
  const Deadline end = system->deadline_in(std::chrono::seconds(20));
  while (*num_fetched < 4 && !end.has_passed(system->now())) system->yield();
  for (; batch != std::default_sentinel; ++batch) continue;
  EXPECT_LT(ahead.data_wait() - first, std::chrono::milliseconds(60));
}

// This process has no devices.
TEST(DataLoader, PinnedMemoryWithoutADeviceHasNoEffect) {
  DataLoader loader = make_data_loader(SyntheticRegression({.num_samples = 6, .num_inputs = 2}),
                                       {.batch_size = 4, .pin_memory = true});
  int64_t num_rows = 0;
  for (const Batch& batch : loader.epoch(0)) {
    EXPECT_FALSE(batch.data.is_pinned());
    num_rows += batch.data.size(0);
  }
  EXPECT_EQ(num_rows, 6);
}

}  // namespace
}  // namespace cadre
