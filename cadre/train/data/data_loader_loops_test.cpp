// Tests loops over one DataLoader that disturb each other, and a Dataset::get that does not return.
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/train/data/data_loader.h"

namespace cadre {
namespace {

using testing::Counting;

std::string failure_of_loop(const std::function<void()>& loop) {
  try {
    loop();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "accepted";
}

TEST(DataLoaderLoops, ALoopOfAnOlderEpochIsRefused) {
  for (const int num_threads : {0, 2}) {
    const DataLoaderOptions options = {.batch_size = 2, .num_threads = num_threads};
    DataLoader loader = make_data_loader(Counting(20), options);
    int64_t num_outer = 0;
    int64_t num_inner = 0;
    const auto nested = [&](const std::function<void()>& inner) {
      num_outer = num_inner = 0;
      return failure_of_loop([&] {
        for (const auto& outer : loader.epoch(0)) {
          num_outer += outer.data.size(0) / 2;
          inner();
        }
      });
    };
    const std::string refusal = "DataLoader: this loop has ended, because another epoch(), seek()";
    EXPECT_THAT(nested([&] {
                  for (const auto& inner : loader.epoch(1)) num_inner += inner.data.size(0) / 2;
                }),
                ::testing::StartsWith(refusal));
    EXPECT_EQ(num_outer, 1);
    EXPECT_EQ(num_inner, 10);
    EXPECT_THAT(nested([&] { loader.seek({.epoch = 0, .samples = 4}); }),
                ::testing::StartsWith(refusal));
    EXPECT_THAT(nested([&] { loader = make_data_loader(Counting(20), options); }),
                ::testing::StartsWith(refusal));
    EXPECT_EQ(nested([] {}), "accepted");
    EXPECT_EQ(num_outer, 10);
  }
}

TEST(DataLoaderLoops, TwoIteratorsOfAnEpochDoNotShareItsBatches) {
  DataLoader loader = make_data_loader(Counting(20), {.batch_size = 2});
  const DataLoader::Epoch older = loader.epoch(3);
  const DataLoader::Epoch epoch = loader.epoch(0);
  EXPECT_THAT(failure_of_loop([&] { (void)older.begin(); }), ::testing::HasSubstr("has ended"));
  auto first = epoch.begin();
  ++first;
  auto second = epoch.begin();  // this iterator gets the remaining batches
  EXPECT_THAT(failure_of_loop([&] { ++first; }), ::testing::HasSubstr("has ended"));
  int64_t num_batches = 0;
  for (; second != std::default_sentinel; ++second) ++num_batches;
  EXPECT_EQ(num_batches, 8);
}

// A dataset whose get() blocks until the test opens the gate.
class Stuck : public Counting {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
    bool is_destroyed = false;  // whether the dataset is destroyed
  };

  explicit Stuck(std::shared_ptr<Gate> gate) : Counting(20), gate_(std::move(gate)) {}
  ~Stuck() override {
    const std::lock_guard lock(gate_->mutex);
    gate_->is_destroyed = true;
    gate_->changed.notify_all();
  }
  Batch get(std::span<const int64_t> indices) const override {
    std::unique_lock lock(gate_->mutex);
    gate_->changed.wait(lock, [this] { return gate_->is_open; });
    return Counting::get(indices);
  }

 private:
  std::shared_ptr<Gate> gate_;
};

// get() never returns, so joining the loader's threads would block. Instead the request throws
// after its timeout, and the stuck thread keeps the dataset.
TEST(DataLoaderLoops, AStuckBatchIsReportedAtItsTimeoutAndItsStateLivesOn) {
  const auto gate = std::make_shared<Stuck::Gate>();
  {
    DataLoader loader(
        std::make_shared<const Stuck>(gate),
        {.batch_size = 5, .num_threads = 2, .timeout = std::chrono::milliseconds(30)});
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        (void)loader.epoch(0).begin();
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
        EXPECT_THAT(error.message(), ::testing::HasSubstr("was not ready within 0.03 s"));
      }
    }
  }
  std::unique_lock lock(gate->mutex);
  gate->is_open = true;
  gate->changed.notify_all();
  EXPECT_TRUE(
      gate->changed.wait_for(lock, std::chrono::seconds(20), [&] { return gate->is_destroyed; }));
}

}  // namespace
}  // namespace cadre
