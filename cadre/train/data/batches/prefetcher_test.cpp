#include "cadre/train/data/batches/prefetcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

namespace cadre {
namespace {

class PrefetcherTest : public ::testing::Test {
 protected:
  std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(PrefetcherTest, HandsOutInOrderWhateverFinishesFirst) {
  for (const int num_threads : {1, 2, 5}) {
    for (const int64_t depth : {1, 3, 50}) {
      // Every fourth item takes longer to make, so items become ready out of order.
      Prefetcher<int64_t> prefetcher(
          *system_, 40,
          [&](int64_t i) {
            const auto waiter = system_->make_waiter();
            waiter->park(system_->deadline_in(std::chrono::microseconds(200 * (i % 4 == 0))));
            return i * i;
          },
          {.num_threads = num_threads, .depth = depth});
      for (int64_t i = 0; i < 40; ++i) ASSERT_EQ(prefetcher.next(), i * i);
    }
  }
}

TEST_F(PrefetcherTest, MakesNoMoreThanItsDepthAhead) {
  std::atomic<int64_t> num_made = 0;
  Prefetcher<int64_t> prefetcher(*system_, 100, [&](int64_t i) { return ++num_made, i; },
                                 {.num_threads = 3, .depth = 4});
  for (int64_t i = 0; i < 100; ++i) {
    prefetcher.next();
    EXPECT_LE(num_made.load(), i + 1 + 4);
  }
  EXPECT_EQ(num_made.load(), 100);
}

TEST_F(PrefetcherTest, WorksAheadWhileNobodyAsks) {
  std::atomic<int64_t> num_made = 0;
  Prefetcher<int64_t> prefetcher(*system_, 100, [&](int64_t i) { return ++num_made, i; },
                                 {.num_threads = 2, .depth = 4});
  const Deadline deadline = system_->deadline_in(std::chrono::seconds(20));
  while (num_made < 4 && !deadline.has_passed(system_->now())) system_->yield();
  EXPECT_EQ(num_made.load(), 4);
}

// The caller takes items in bursts. Between them the threads are idle at their depth; within one
// the caller waits, so the depth is raised up to its bound.
TEST_F(PrefetcherTest, RaisesItsDepthIfTheCallerWaitsAndThreadsWereIdle) {
  for (const int64_t max_depth : {0, 7}) {
    std::atomic<int64_t> num_made = 0;
    int64_t num_taken = 0;
    Prefetcher<int64_t> prefetcher(
        *system_, 1000,
        [&](int64_t i) {
          const auto waiter = system_->make_waiter();
          waiter->park(system_->deadline_in(std::chrono::milliseconds(1)));
          ++num_made;
          return i;
        },
        {.num_threads = 2, .depth = 2, .max_depth = max_depth});
    for (int burst = 0; burst < 8; ++burst) {
      const Deadline deadline = system_->deadline_in(std::chrono::seconds(20));
      const auto is_full = [&] { return num_made - num_taken >= prefetcher.depth(); };
      while (!is_full() && !deadline.has_passed(system_->now())) system_->yield();
      ASSERT_TRUE(is_full());
      // The threads notice at their next request that the depth is reached.
      const auto waiter = system_->make_waiter();
      waiter->park(system_->deadline_in(std::chrono::milliseconds(2)));
      for (int i = 0; i < 20; ++i) ASSERT_EQ(prefetcher.next(), num_taken++);
    }
    EXPECT_EQ(prefetcher.depth(), max_depth == 0 ? 2 : 7);
  }
}

// A caller that is faster than the threads gains nothing from a larger depth.
TEST_F(PrefetcherTest, KeepsItsDepthIfTheThreadsAreNeverIdle) {
  Prefetcher<int64_t> prefetcher(*system_, 50,
                                 [&](int64_t i) {
                                   const auto waiter = system_->make_waiter();
                                   waiter->park(system_->deadline_in(std::chrono::milliseconds(2)));
                                   return i;
                                 },
                                 {.num_threads = 1, .depth = 2, .max_depth = 100});
  for (int64_t i = 0; i < 50; ++i) ASSERT_EQ(prefetcher.next(), i);
  EXPECT_LT(prefetcher.depth(), 8);
}

TEST_F(PrefetcherTest, AnErrorComesAtItsPlace) {
  Prefetcher<int64_t> prefetcher(
      *system_, 10, [](int64_t i) { return i == 3 ? throw std::runtime_error("third") : i; },
      {.num_threads = 2, .depth = 8});
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(prefetcher.next(), i);
  EXPECT_THROW(prefetcher.next(), std::runtime_error);
}

TEST_F(PrefetcherTest, AnItemThatDoesNotComeIsNamed) {
  std::atomic<bool> may_end = false;
  Prefetcher<int64_t> prefetcher(*system_, 2,
                                 [&](int64_t i) {
                                   while (!may_end) system_->yield();
                                   return i;
                                 },
                                 {.num_threads = 1, .timeout = std::chrono::milliseconds(20)});
  try {
    prefetcher.next();
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_THAT(error.message(), ::testing::HasSubstr("item 0 of 2 was not ready within 0.02 s"));
  }
  may_end = true;
}

// The prefetcher is destroyed while some items are ready, some are being made, and others are not
// begun.
TEST_F(PrefetcherTest, MayBeLeftAtAnyMoment) {
  for (int64_t num_taken = 0; num_taken < 20; ++num_taken) {
    Prefetcher<std::unique_ptr<int64_t>> prefetcher(
        *system_, 20, [](int64_t i) { return std::make_unique<int64_t>(i); },
        {.num_threads = 3, .depth = 5});
    for (int64_t i = 0; i < num_taken; ++i) EXPECT_EQ(*prefetcher.next(), i);
  }
}

}  // namespace
}  // namespace cadre
