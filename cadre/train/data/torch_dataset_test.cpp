#include "cadre/train/data/torch_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/streams/stream_loader.h"

namespace cadre {
namespace {

namespace td = torch::data;

// A dataset of torch::data in which sample i is {i, i + 0.5}, with the target -i.
class Pairs : public td::datasets::Dataset<Pairs> {
 public:
  explicit Pairs(size_t size) : size_(size) {}
  td::Example<> get(size_t index) override {
    // Only one thread may use a copy at a time.
    EXPECT_EQ(num_users_.value.fetch_add(1), 0);
    const auto value = static_cast<double>(index);
    td::Example<> example{torch::tensor({value, value + 0.5}),
                          torch::tensor(-static_cast<int64_t>(index))};
    num_users_.value.fetch_sub(1);
    return example;
  }
  std::optional<size_t> size() const override { return size_; }

 private:
  // A counter of each copy of the dataset.
  struct Users {
    Users() = default;
    Users(const Users&) {}
    Users& operator=(const Users&) { return *this; }
    ~Users() = default;
    std::atomic<int> value = 0;
  };

  size_t size_;
  Users num_users_;
};

std::vector<int64_t> targets_of(DataLoader& loader, int64_t epoch) {
  std::vector<int64_t> all;
  for (const auto& [data, target] : loader.epoch(epoch)) {
    EXPECT_EQ(data.size(1), 2);
    EXPECT_TRUE(data.select(1, 0).equal(target.neg().to(data.dtype())));
    EXPECT_TRUE(data.select(1, 1).equal(target.neg().to(data.dtype()) + 0.5));
    const auto* first = target.const_data_ptr<int64_t>();
    all.insert(all.end(), first, first + target.numel());
  }
  return all;
}

TEST(TorchDataset, ItsSamplesAreThoseOfTheDataset) {
  for (const int num_threads : {0, 3}) {
    const DataLoaderOptions options = {.batch_size = 7, .seed = 2, .num_threads = num_threads};
    DataLoader of_examples = make_data_loader(Pairs(60), options);
    DataLoader stacked = make_data_loader(Pairs(60).map(td::transforms::Stack<>()), options);
    std::vector<int64_t> all = targets_of(of_examples, 1);
    EXPECT_EQ(targets_of(stacked, 1), all);
    std::ranges::sort(all, std::ranges::greater());
    for (int64_t i = 0; i < 60; ++i) ASSERT_EQ(all[static_cast<size_t>(i)], -i);
  }
}

TEST(TorchDataset, TransformsRunInTheirOrder) {
  auto transformed = Pairs(4)
                         .map(td::transforms::Lambda<td::Example<>>([](td::Example<> example) {
                           example.data = example.data * 10;
                           return example;
                         }))
                         .map(td::transforms::Normalize<>(5.0, 2.0))
                         .map(td::transforms::Stack<>());
  DataLoader loader = make_data_loader(transformed, {.batch_size = 4, .shuffle = false});
  const Batch batch = *loader.epoch(0).begin();
  const torch::Tensor expected =
      torch::tensor({{-2.5, 0.0}, {2.5, 5.0}, {7.5, 10.0}, {12.5, 15.0}});
  EXPECT_TRUE(batch.data.reshape({4, 2}).equal(expected));  // Normalize<> adds dimensions
}

TEST(TorchDataset, RanksWithoutASampleGetNoRows) {
  const auto result = testing::run_groups(3, [](const ProcessGroup& world) {
    DataLoader loader = make_data_loader(Pairs(4).map(td::transforms::Stack<>()),
                                         {.batch_size = 3, .ranks = world, .num_threads = 2});
    std::vector<int64_t> rows;
    for (const Batch& batch : loader.epoch(0)) {
      rows.push_back(batch.data.size(0));
      EXPECT_EQ(batch.data.size(1), 2);
      EXPECT_EQ(batch.target.scalar_type(), torch::kLong);
    }
    EXPECT_EQ(rows, (std::vector<int64_t>{1, world.rank() == 0 ? 1 : 0}));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(TorchDataset, ExamplesWithoutATarget) {
  const auto tensors = td::datasets::TensorDataset(torch::arange(5));
  DataLoader loader = make_data_loader(tensors, {.batch_size = 5, .shuffle = false});
  const Batch batch = *loader.epoch(0).begin();
  EXPECT_TRUE(batch.data.equal(torch::arange(5)));
  EXPECT_FALSE(batch.target.defined());
}

TEST(TorchDataset, IsASourceOfStreams) {
  StreamLoader loader(stream_dataset(torch_dataset(Pairs(10)), {.shuffle = false}),
                      {.batch_size = 4, .num_threads = 2});
  std::vector<int64_t> rows;
  for (const Batch& batch : loader.epoch(0)) rows.push_back(batch.data.size(0));
  EXPECT_EQ(rows, (std::vector<int64_t>{4, 4, 2}));
}

// A dataset without a size, or whose get() throws for a sample.
class Odd : public td::datasets::Dataset<Odd> {
 public:
  explicit Odd(std::optional<size_t> size) : size_(size) {}
  td::Example<> get(size_t index) override {
    if (index == 5) throw std::runtime_error("sample 5 is damaged");
    return {torch::zeros({1}), torch::zeros({1})};
  }
  std::optional<size_t> size() const override { return size_; }

 private:
  std::optional<size_t> size_;
};

TEST(TorchDataset, ItsErrorsComeAtTheirBatch) {
  EXPECT_THROW(torch_dataset(Odd(std::nullopt)), Error);
  for (const int num_threads : {0, 2}) {
    DataLoader loader =
        make_data_loader(Odd(9), {.batch_size = 2, .shuffle = false, .num_threads = num_threads});
    int64_t num_batches = 0;
    EXPECT_THROW(for (const Batch& batch
                      : loader.epoch(0)) num_batches += batch.data.size(1),
                 std::runtime_error);
    EXPECT_EQ(num_batches, 2);
  }
}

}  // namespace
}  // namespace cadre
