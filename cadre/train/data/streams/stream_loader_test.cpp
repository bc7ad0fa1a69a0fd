#include "cadre/train/data/streams/stream_loader.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/counting_stream.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::counting_stream;
using testing::values_of_epoch;

using Numbers = std::vector<int64_t>;
using MakeStream = std::function<std::shared_ptr<SampleStream>()>;

Numbers numbers_of(const Batch& batch) {
  const auto* first = batch.data.const_data_ptr<int64_t>();
  return {first, first + batch.data.numel()};
}

// Maps, streams and interleaved streams, shuffled or not, by a seed.
MakeStream source_of(uint64_t seed) {
  return [seed]() -> std::shared_ptr<SampleStream> {
    Random random(seed);
    const auto size = static_cast<int64_t>(random.below(90));
    const auto buffer = static_cast<int64_t>(1 + random.below(30));
    const auto map = [&] {
      return map_stream(
          stream_dataset(std::make_shared<const testing::Counting>(size), {.seed = 1}),
          [](const Sample& sample) {
            return Sample{.data = sample.data, .target = sample.target.neg()};
          });
    };
    const auto stream = [&] { return counting_stream({.num_samples = size, .first = 1000}); };
    switch (random.below(4)) {
      case 0:
        return map();
      case 1:
        return stream();
      case 2:
        return shuffle_stream(stream(), {.buffer_size = buffer});
      default:
        return shuffle_stream(
            interleave_streams({{.stream = map(), .weight = 2}, {.stream = stream()}}),
            {.buffer_size = buffer});
    }
  };
}

struct Part {
  std::vector<std::vector<Numbers>> by_rank;  // the batches of each rank
  std::string state;                          // of rank 0, after the last batch
};

// Reads at most max_batches batches on each rank of a group, from the state or the epoch's start.
Part read_part(int world_size, const MakeStream& make, const StreamLoaderOptions& options,
               int64_t epoch, const std::string& state, int64_t max_batches) {
  Part part;
  part.by_rank.resize(static_cast<size_t>(world_size));
  std::vector<std::string> states(static_cast<size_t>(world_size));
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& world) {
    StreamLoaderOptions own = options;
    own.ranks = world;
    StreamLoader loader(make(), own);
    if (!state.empty()) loader.load_state(state);
    auto& batches = part.by_rank[static_cast<size_t>(world.rank())];
    if (max_batches > 0) {
      for (const Batch& batch : loader.epoch(epoch)) {
        EXPECT_TRUE(batch.target.equal(-batch.data));
        batches.push_back(numbers_of(batch));
        if (std::ssize(batches) == max_batches) break;
      }
    }
    states[static_cast<size_t>(world.rank())] = loader.state();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const std::string& each : states) EXPECT_EQ(each, states[0]);
  part.state = states[0];
  return part;
}

// Returns the samples of all batches in the order of one rank, for BatchSplit::kConsecutive.
Numbers in_rank_order(const Part& part) {
  Numbers all;
  for (size_t k = 0; k < part.by_rank[0].size(); ++k) {
    for (const auto& batches : part.by_rank) {
      if (k < batches.size()) all.insert(all.end(), batches[k].begin(), batches[k].end());
    }
  }
  return all;
}

// The same for BatchSplit::kInTurn, in which the ranks take the samples of the epoch in turn.
Numbers in_turn(const Part& part, int64_t first) {
  std::vector<Numbers> of_rank(part.by_rank.size());
  size_t total = 0;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    for (const Numbers& batch : part.by_rank[rank]) {
      of_rank[rank].insert(of_rank[rank].end(), batch.begin(), batch.end());
    }
    total += of_rank[rank].size();
  }
  Numbers all;
  std::vector<size_t> next(of_rank.size());
  for (size_t i = 0; i < total; ++i) {
    const size_t rank = (static_cast<size_t>(first) + i) % of_rank.size();
    if (next[rank] == of_rank[rank].size()) return {};  // the division is wrong
    all.push_back(of_rank[rank][next[rank]++]);
  }
  return all;
}

TEST(StreamLoader, AnyNumberOfRanksContinuesWhereAnotherStopped) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const MakeStream make = source_of(seed);
    const auto epoch = static_cast<int64_t>(seed % 3);
    const Numbers expected = values_of_epoch(*make(), epoch);
    Random random(seed + 1000);
    Numbers seen;
    std::string state;
    for (int part_index = 0; part_index < 8; ++part_index) {
      const auto world_size = static_cast<int>(1 + random.below(4));
      const bool is_last = part_index == 7;
      const auto batch_size = static_cast<int64_t>(4 + random.below(12));
      const StreamLoaderOptions options = {
          .batch_size = batch_size,
          .split = random.below(2) == 0 ? BatchSplit::kInTurn : BatchSplit::kConsecutive,
          .num_threads = static_cast<int>(random.below(4)),
          .prefetch = static_cast<int64_t>(1 + random.below(3))};
      const int64_t max_batches = is_last ? 1000 : static_cast<int64_t>(random.below(3));
      const Part part = read_part(world_size, make, options, epoch, state, max_batches);
      const Numbers next = options.split == BatchSplit::kInTurn ? in_turn(part, std::ssize(seen))
                                                                : in_rank_order(part);
      seen.insert(seen.end(), next.begin(), next.end());
      if (max_batches > 0 || !state.empty()) state = part.state;
      ASSERT_TRUE(seen.size() <= expected.size() &&
                  std::equal(seen.begin(), seen.end(), expected.begin()))
          << "seed " << seed << ", part " << part_index;
    }
    EXPECT_EQ(seen, expected) << "seed " << seed;
  }
}

TEST(StreamLoader, SharesDifferByAtMostOneSample) {
  for (const BatchSplit split : {BatchSplit::kInTurn, BatchSplit::kConsecutive}) {
    const auto make = [] { return counting_stream({.num_samples = 26}); };
    const Part part = read_part(3, make, {.batch_size = 8, .split = split}, 0, "", 100);
    for (const auto& batches : part.by_rank) {
      ASSERT_EQ(batches.size(), 4);
      for (size_t k = 0; k < 3; ++k) EXPECT_NEAR(batches[k].size(), 8 / 3.0, 1);
      EXPECT_LE(batches[3].size(), 1);
    }
    const Part dropped =
        read_part(3, make, {.batch_size = 8, .drop_last = true, .split = split}, 0, "", 100);
    for (const auto& batches : dropped.by_rank) EXPECT_EQ(batches.size(), 3);
  }
}

TEST(StreamLoader, FewerSamplesThanRanks) {
  for (const int num_threads : {0, 2}) {
    const StreamLoaderOptions options = {.batch_size = 4, .num_threads = num_threads};
    const Part none = read_part(
        4, [] { return counting_stream({.num_samples = 0}); }, options, 0, "", 9);
    for (const auto& batches : none.by_rank) EXPECT_TRUE(batches.empty());
    const auto result = testing::run_groups(4, [&](const ProcessGroup& world) {
      StreamLoaderOptions own = options;
      own.ranks = world;
      const auto wide = map_stream(counting_stream({.num_samples = 1}), [](const Sample& sample) {
        return Sample{.data = sample.data.expand({2, 3}), .target = {}};
      });
      StreamLoader loader(wide, own);
      int64_t num_batches = 0;
      for (const Batch& batch : loader.epoch(0)) {
        ++num_batches;
        EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{world.rank() == 0 ? 1 : 0, 2, 3}));
        EXPECT_EQ(batch.data.scalar_type(), at::kLong);
        EXPECT_FALSE(batch.target.defined());
      }
      EXPECT_EQ(num_batches, 1);
      EXPECT_EQ(loader.position(), (LoaderPosition{0, 1}));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Runs epoch 0 on 3 ranks, of which rank 1 has its own stream. Returns the error of each rank, and
// what the ranks read when they request the failed batch again.
struct Failures {
  std::vector<std::string> messages = std::vector<std::string>(3, "accepted");
  std::vector<Numbers> before = std::vector<Numbers>(3);
  std::vector<Numbers> after = std::vector<Numbers>(3);
};

Failures failures_of(const MakeStream& make, const MakeStream& make_odd,
                     const StreamLoaderOptions& options) {
  Failures failures;
  const auto result = testing::run_groups(3, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    StreamLoaderOptions own = options;
    own.ranks = world;
    StreamLoader loader(rank == 1 ? make_odd() : make(), own);
    const auto append = [](Numbers& to, const Batch& batch) {
      const Numbers numbers = numbers_of(batch);
      to.insert(to.end(), numbers.begin(), numbers.end());
    };
    try {
      for (const Batch& batch : loader.epoch(0)) append(failures.before[rank], batch);
    } catch (const Error& error) {
      failures.messages[rank] = error.message();
    } catch (...) {
      failures.messages[rank] = "not an Error";
    }
    world.barrier();  // the error left the group usable
    loader.load_state(loader.state());
    try {
      for (const Batch& batch : loader.epoch(0)) append(failures.after[rank], batch);
    } catch (const Error&) {
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return failures;
}

TEST(StreamLoader, AnErrorOfOneRanksSourceIsThrownOnAllRanks) {
  for (const int num_threads : {0, 2}) {
    const auto make = [] { return counting_stream({.num_samples = 30}); };
    const auto has_failed = std::make_shared<std::atomic<bool>>(false);
    const auto failing = [&] {
      return counting_stream({.num_samples = 30, .before = [=](int64_t index) {
                                if (index == 13 && !has_failed->exchange(true)) {
                                  throw Error(ErrorCode::kUnavailable, "the disk is gone");
                                }
                              }});
    };
    const Failures failures =
        failures_of(make, failing, {.batch_size = 6, .num_threads = num_threads});
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_THAT(failures.messages[rank], ::testing::HasSubstr("the disk is gone"));
      EXPECT_THAT(failures.messages[rank], ::testing::HasSubstr("rank 1"));
      EXPECT_EQ(failures.before[rank].size(), 4);
      ASSERT_EQ(failures.after[rank].size(), 6);
      for (size_t i = 0; i < 6; ++i) {
        EXPECT_EQ(failures.after[rank][i], 12 + static_cast<int64_t>(rank + 3 * i));
      }
    }
  }
}

// A stream that fails once, and counts calls of next() between its failure and load_state().
class FailingOnce : public testing::CountingStream {
 public:
  FailingOnce() : CountingStream({.num_samples = 40}) {}
  std::optional<StreamItem> next() override {
    if (is_failed_) ++num_late_calls;
    std::optional<StreamItem> item = CountingStream::next();
    if (++num_calls_ != 6) return item;
    // The other threads wait for their turn meanwhile.
    const auto waiter = system_->make_waiter();
    const Deadline end = system_->deadline_in(std::chrono::milliseconds(30));
    while (!end.has_passed(system_->now())) waiter->park(end);
    is_failed_ = true;
    throw Error(ErrorCode::kUnavailable, "the disk is gone");
  }
  void load_state(std::string_view state) override {
    is_failed_ = false;
    CountingStream::load_state(state);
  }

  std::atomic<int> num_late_calls = 0;

 private:
  std::unique_ptr<os::System> system_ = os::make_native_system();
  int num_calls_ = 0;
  bool is_failed_ = false;
};

TEST(StreamLoader, NoThreadReadsAStreamThatHasFailed) {
  const auto stream = std::make_shared<FailingOnce>();
  StreamLoader loader(stream, {.batch_size = 2, .num_threads = 4});
  Numbers seen;
  EXPECT_THROW(for (const Batch& batch
                    : loader.epoch(0)) seen.push_back(numbers_of(batch)[0]),
               Error);
  EXPECT_EQ(seen, (Numbers{0, 2}));
  EXPECT_EQ(stream->num_late_calls, 0);
  loader.load_state(loader.state());
  EXPECT_EQ(numbers_of(*loader.epoch(0).begin()), (Numbers{4, 5}));
}

TEST(StreamLoader, AnErrorOfASamplesFunctionIsThrownOnAllRanks) {
  const auto make = [] { return counting_stream({.num_samples = 30}); };
  const auto throwing = [&](int value) {
    return [=] {
      return map_stream(make(), [=](const Sample& sample) {
        if (sample.data.item<int64_t>() == 13) {
          if (value == 0) throw std::runtime_error("a bad line");
          throw value;
        }
        return sample;
      });
    };
  };
  for (const int value : {0, 7}) {
    const Failures failures = failures_of(make, throwing(value), {.batch_size = 6});
    for (const std::string& message : failures.messages) {
      EXPECT_THAT(message, ::testing::HasSubstr(value == 0 ? "a bad line" : "rank 1"));
    }
  }
}

TEST(StreamLoader, StreamsThatDifferAreRefusedOnAllRanks) {
  const auto of_size = [](int64_t size) {
    return [size] { return counting_stream({.num_samples = size}); };
  };
  for (const int num_threads : {0, 2}) {
    // Rank 1's stream ends earlier, or later.
    for (const int64_t other : {12, 13, 40}) {
      const Failures failures =
          failures_of(of_size(30), of_size(other), {.batch_size = 6, .num_threads = num_threads});
      EXPECT_THAT(
          failures.messages,
          ::testing::Each(::testing::HasSubstr("the streams of the ranks differ: after sample")));
      EXPECT_EQ(failures.messages[0], failures.messages[1]);
    }
  }
  EXPECT_THAT(failures_of(of_size(0), of_size(3), {.batch_size = 6}).messages,
              ::testing::Each(::testing::HasSubstr("after sample 0 of epoch 0, rank 0 reads 0")));
}

TEST(StreamLoader, OptionsThatDifferAreRefusedOnAllRanks) {
  const auto refusals = [](const StreamLoaderOptions& odd, const MakeStream& make_odd) {
    std::vector<std::string> messages(2, "accepted");
    const auto result = testing::run_groups(2, [&](const ProcessGroup& world) {
      const bool is_odd = world.rank() == 1;
      StreamLoaderOptions own = is_odd ? odd : StreamLoaderOptions{.batch_size = 4};
      own.ranks = world;
      try {
        StreamLoader(is_odd ? make_odd() : counting_stream({.num_samples = 9, .digest = 5}), own);
      } catch (const Error& error) {
        messages[static_cast<size_t>(world.rank())] = error.message();
      }
      world.barrier();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    return messages;
  };
  const auto same = [] { return counting_stream({.num_samples = 9, .digest = 5}); };
  const auto all_have = [](const std::string& text) {
    return ::testing::Each(::testing::HasSubstr(text));
  };
  EXPECT_THAT(refusals({.batch_size = 4}, same), ::testing::Each("accepted"));
  EXPECT_THAT(refusals({.batch_size = 6}, same), all_have("batch_size is 4 on rank 0 and 6"));
  EXPECT_THAT(refusals({.batch_size = 4, .drop_last = true}, same), all_have("drop_last is 0"));
  EXPECT_THAT(refusals({.batch_size = 4, .split = BatchSplit::kConsecutive}, same),
              all_have("split is 0"));
  EXPECT_THAT(refusals({.batch_size = 4}, [] { return counting_stream({.digest = 6}); }),
              all_have("stream digest is"));
  EXPECT_THAT(refusals({.batch_size = 4}, [] { return nullptr; }), all_have("is null"));
  EXPECT_THAT(refusals({.batch_size = 4, .collate = nullptr}, same), all_have("is null"));
  EXPECT_THAT(refusals({.batch_size = 4, .num_threads = -1}, same), all_have("num_threads is -1"));
  EXPECT_THROW(StreamLoader(same(), {.batch_size = 0}), Error);
}

TEST(StreamLoader, StatesThatDifferOrAreDamagedAreRefusedOnAllRanks) {
  const auto make = [] { return counting_stream({.num_samples = 40}); };
  const std::string state = read_part(2, make, {.batch_size = 6}, 0, "", 2).state;
  const std::string later = read_part(2, make, {.batch_size = 6}, 0, "", 3).state;
  for (const std::string& odd : {later, state.substr(0, 30), std::string(), std::string(99, 'x')}) {
    std::vector<std::string> messages(2, "accepted");
    std::vector<Numbers> first(2);
    const auto result = testing::run_groups(2, [&](const ProcessGroup& world) {
      const auto rank = static_cast<size_t>(world.rank());
      StreamLoader loader(make(), {.batch_size = 6, .ranks = world});
      auto batch = loader.epoch(0).begin();
      try {
        loader.load_state(rank == 1 ? odd : state);
      } catch (const Error& error) {
        messages[rank] = error.message();
      }
      EXPECT_EQ(loader.position(), (LoaderPosition{0, 6}));
      loader.load_state(state);
      EXPECT_EQ(loader.position(), (LoaderPosition{0, 12}));
      first[rank] = numbers_of(*loader.epoch(0).begin());
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_NE(messages[0], "accepted");
    EXPECT_EQ(first[0], (Numbers{12, 14, 16}));
  }
}

TEST(StreamLoader, ALoopOfAnOlderEpochIsRefused) {
  StreamLoader loader(counting_stream({.num_samples = 20}), {.batch_size = 2, .num_threads = 2});
  auto first = loader.epoch(0).begin();
  const std::string state = loader.state();
  auto second = loader.epoch(1).begin();
  EXPECT_THROW(++first, Error);
  loader.load_state(state);
  EXPECT_THROW(++second, Error);
  EXPECT_EQ(numbers_of(*loader.epoch(0).begin()), (Numbers{2, 3}));
  // Only the first epoch() after load_state() continues.
  EXPECT_EQ(numbers_of(*loader.epoch(0).begin()), (Numbers{0, 1}));
  StreamLoader moved = std::move(loader);
  EXPECT_EQ(numbers_of(*moved.epoch(0).begin()), (Numbers{0, 1}));
  EXPECT_THROW(loader.epoch(0), Error);  // NOLINT(bugprone-use-after-move): is refused
  EXPECT_THROW(moved.epoch(-1), Error);
}

TEST(StreamLoader, ItsCollateMakesTheBatch) {
  StreamLoader loader(counting_stream({.num_samples = 5}),
                      {.batch_size = 3, .collate = [](const std::vector<Sample>& samples) {
                         Batch batch = stack_samples(samples);
                         batch.data = batch.data.mul(10);
                         return batch;
                       }});
  std::vector<Numbers> seen;
  for (const Batch& batch : loader.epoch(0)) seen.push_back(numbers_of(batch));
  EXPECT_EQ(seen, (std::vector<Numbers>{{0, 10, 20}, {30, 40}}));
  StreamLoader wrong(counting_stream({.num_samples = 5}),
                     {.batch_size = 3, .collate = [](const std::vector<Sample>&) {
                        return Batch{.data = at::zeros({2}), .target = {}};
                      }});
  EXPECT_THROW(wrong.epoch(0).begin(), Error);
  const Sample one{.data = at::zeros({2}), .target = {}};
  EXPECT_THROW(stack_samples({}), Error);
  EXPECT_THROW(stack_samples({one, {.data = at::zeros({3}), .target = {}}}), Error);
  EXPECT_THROW(stack_samples({one, {.data = at::zeros({2}, at::kLong), .target = {}}}), Error);
  EXPECT_THROW(stack_samples({one, {.data = at::zeros({2}), .target = at::zeros({1})}}), Error);
}

// No batch comes before the one that is late: a machine under load may make it late, too.
TEST(StreamLoader, AStreamThatDoesNotReturnIsReportedAtItsTimeout) {
  const auto is_open = std::make_shared<std::atomic<bool>>(false);
  const auto system = std::shared_ptr<os::System>(os::make_native_system());
  {
    StreamLoader loader(
        counting_stream({.num_samples = 20,
                         .before =
                             [=](int64_t index) {
                               const auto waiter = system->make_waiter();
                               while (index == 0 && !*is_open) {
                                 waiter->park(system->deadline_in(std::chrono::milliseconds(1)));
                               }
                             }}),
        {.batch_size = 2, .num_threads = 2, .timeout = std::chrono::milliseconds(100)});
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        (void)loader.epoch(0).begin();
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
      }
    }
    EXPECT_THROW(loader.load_state(loader.state()), Error);
    *is_open = true;
  }
}

// A kTimeout of the source is one of its errors: its threads have returned.
TEST(StreamLoader, ATimeoutOfTheSourceCanBeRetried) {
  const auto has_failed = std::make_shared<std::atomic<bool>>(false);
  StreamLoader loader(counting_stream({.num_samples = 6,
                                       .before =
                                           [=](int64_t index) {
                                             if (index == 3 && !has_failed->exchange(true)) {
                                               throw Error(ErrorCode::kTimeout, "item is late");
                                             }
                                           }}),
                      {.batch_size = 2, .num_threads = 2});
  auto batch = loader.epoch(0).begin();
  EXPECT_THROW(++batch, Error);
  ++batch;
  EXPECT_EQ(numbers_of(*batch), (Numbers{2, 3}));
}

TEST(StreamLoader, CountsTheTimeOfWaitingForData) {
  const auto system = std::shared_ptr<os::System>(os::make_native_system());
  StreamLoader loader(counting_stream({.num_samples = 4,
                                       .before =
                                           [=](int64_t) {
                                             const auto waiter = system->make_waiter();
                                             const auto end =
                                                 system->now() + std::chrono::milliseconds(20);
                                             while (system->now() < end) {
                                               waiter->park(Deadline(end));
                                             }
                                           }}),
                      {.batch_size = 1});
  for (const Batch& batch : loader.epoch(0)) (void)batch;
  EXPECT_GE(loader.data_wait(), std::chrono::milliseconds(80));
  EXPECT_LT(loader.data_wait(), std::chrono::seconds(10));
}

}  // namespace
}  // namespace cadre
