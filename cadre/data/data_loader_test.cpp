#include "cadre/data/data_loader.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/data/distributed_sampler.h"
#include "cadre/data/synthetic_dataset.h"

namespace cadre {
namespace {

using Indices = std::vector<int64_t>;

// Its samples are their own indices.
class Counting : public Dataset {
 public:
  explicit Counting(int64_t num_samples) : num_samples_(num_samples) {}
  int64_t size() const override { return num_samples_; }
  Batch get(std::span<const int64_t> indices) const override {
    const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
    return {.data = rows, .target = rows};
  }

 private:
  int64_t num_samples_;
};

Indices values(const at::Tensor& tensor) {
  const auto* first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

std::vector<Indices> batches_of(DataLoader& loader, int64_t epoch) {
  std::vector<Indices> batches;
  for (const auto& [data, target] : loader.epoch(epoch)) batches.push_back(values(data));
  return batches;
}

TEST(DataLoader, BatchesHaveTheSameSamplesOnAnyNumberOfRanks) {
  const int64_t num_samples = 103;
  for (const int64_t batch_size : {25, 48}) {
    DataLoader whole = make_data_loader(Counting(num_samples), {.batch_size = batch_size});
    const std::vector<Indices> expected = batches_of(whole, 3);
    ASSERT_EQ(static_cast<int64_t>(expected.size()), whole.batches_per_epoch());
    for (const int world_size : {2, 3, 4}) {
      std::vector<Indices> united(expected.size());
      for (int rank = 0; rank < world_size; ++rank) {
        DataLoader loader =
            make_data_loader(Counting(num_samples),
                             {.batch_size = batch_size, .rank = rank, .world_size = world_size});
        const std::vector<Indices> shares = batches_of(loader, 3);
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
  const DistributedSampler sampler({.num_samples = 96, .rank = 2, .world_size = 3, .seed = 5});
  DataLoader loader =
      make_data_loader(Counting(96), {.batch_size = 25, .rank = 2, .world_size = 3, .seed = 5});
  Indices seen;
  for (const Indices& batch : batches_of(loader, 1)) {
    seen.insert(seen.end(), batch.begin(), batch.end());
  }
  EXPECT_EQ(seen, sampler.indices(1));
}

TEST(DataLoader, AShortLastBatchMayLeaveARankWithoutASample) {
  DataLoader loader = make_data_loader(
      Counting(9), {.batch_size = 4, .rank = 3, .world_size = 4, .shuffle = false});
  EXPECT_EQ(batches_of(loader, 0), (std::vector<Indices>{{3}, {7}, {}}));
  DataLoader cut = make_data_loader(
      Counting(9),
      {.batch_size = 4, .rank = 3, .world_size = 4, .shuffle = false, .drop_last = true});
  EXPECT_EQ(batches_of(cut, 0), (std::vector<Indices>{{3}, {7}}));
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
    EXPECT_EQ(batches_of(resumed, 2), expected) << "seek counts once";
  }
}

TEST(DataLoader, ThreadsChangeNothingThatIsDelivered) {
  for (const bool drop_last : {false, true}) {
    const DataLoaderOptions plain = {
        .batch_size = 7, .rank = 1, .world_size = 3, .seed = 4, .drop_last = drop_last};
    DataLoaderOptions threaded = plain;
    threaded.num_threads = 3;
    DataLoader expected = make_data_loader(Counting(100), plain);
    DataLoader actual = make_data_loader(Counting(100), threaded);
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      EXPECT_EQ(batches_of(actual, epoch), batches_of(expected, epoch));
      EXPECT_EQ(actual.position(), expected.position());
    }
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

// Fails once at one sample.
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

TEST(DataLoader, RefusesWhatCannotBe) {
  EXPECT_THROW(make_data_loader(Counting(9), {.num_threads = -1}), Error);
  EXPECT_THROW(make_data_loader(Counting(9), {.num_threads = 1, .prefetch = 0}), Error);

  EXPECT_THROW(make_data_loader(Counting(9), {.batch_size = 1, .world_size = 2}), Error);
  EXPECT_THROW(make_data_loader(Counting(9), {.batch_size = 10, .drop_last = true}), Error);
  EXPECT_THROW(make_data_loader(Counting(0), {.batch_size = 1}), Error);
  DataLoader loader = make_data_loader(Counting(9), {.batch_size = 1});
  EXPECT_THROW(loader.seek({.epoch = 0, .samples = 10}), Error);
}

TEST(SyntheticRegression, IsAFunctionOfSeedAndIndex) {
  const SyntheticRegression a({.num_samples = 16, .num_inputs = 3, .seed = 7});
  const SyntheticRegression b({.num_samples = 16, .num_inputs = 3, .seed = 7});
  const Batch all = a.get(Indices{3, 5});
  EXPECT_TRUE(all.data.equal(b.get(Indices{3, 5}).data));
  EXPECT_TRUE(all.target[1].equal(b.get(Indices{5}).target[0]));
  EXPECT_FALSE(all.data[0].equal(all.data[1]));
  const SyntheticRegression other({.num_samples = 16, .num_inputs = 3, .seed = 8});
  EXPECT_FALSE(all.data.equal(other.get(Indices{3, 5}).data));
  EXPECT_EQ(all.data.sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(all.target.sizes(), (at::IntArrayRef{2, 1}));
}

}  // namespace
}  // namespace cadre
