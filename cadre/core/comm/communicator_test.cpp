// Tests the Communicator on threads that share one native System, over shared memory and over TCP.
#include "cadre/core/comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::RanksResult;
using testing::require;
using testing::run_ranks_as_threads;

constexpr Duration kBudget = seconds(20);

// The objects that the ranks of one test share.
struct Job {
  std::shared_ptr<Store> store;
  CommunicatorOptions options;
  uint64_t round = 1;
};

std::unique_ptr<Communicator> connect(RankContext& context, const Job& job) {
  Membership membership;
  membership.rank = context.rank;
  membership.world_size = context.world_size;
  membership.round = job.round;
  membership.store = job.store;
  membership.job_token = "token";
  return Communicator::connect(context.system, membership, job.options,
                               context.system.deadline_in(kBudget));
}

template <typename T>
ConstBytes in_bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <typename T>
Bytes out_bytes(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

using Body = std::function<void(RankContext&, Communicator&)>;

RanksResult run_group(int world_size, const CommunicatorOptions& options, const Body& body) {
  const auto system = os::make_native_system();
  Job job{std::make_shared<HashStore>(*system), options};
  return run_ranks_as_threads(world_size, [&](RankContext& context) {
    const auto communicator = connect(context, job);
    body(context, *communicator);
    communicator->close(context.system.deadline_in(kBudget));
  });
}

struct Case {
  TransportChoice transport;
  int world_size;
};

class CommunicatorTest : public ::testing::TestWithParam<Case> {
 protected:
  RanksResult run(const Body& body) {
    CommunicatorOptions options;
    options.transport = GetParam().transport;
    options.timeout = kBudget;
    return run_group(GetParam().world_size, options, body);
  }
};

// The expected values come from a formula: rank r contributes (r + 1) * (i + 1).
TEST_P(CommunicatorTest, EveryCollectiveGivesWhatItsFormulaSays) {
  const auto result = run([](RankContext& context, Communicator& group) {
    const int world = context.world_size;
    const auto rank = static_cast<int64_t>(context.rank.value);
    for (const size_t count : {1UL, 7UL, 1000UL, 100'003UL}) {
      std::vector<int64_t> mine(count);
      for (size_t i = 0; i < count; ++i) mine[i] = (rank + 1) * static_cast<int64_t>(i + 1);
      std::vector<int64_t> out(count);
      group.all_reduce(in_bytes(mine), out_bytes(out), DType::kInt64, ReduceOp::kSum);
      const int64_t factor = world * (world + 1) / 2;
      for (size_t i = 0; i < count; ++i) {
        require(out[i] == factor * static_cast<int64_t>(i + 1), format("all_reduce at {}", i));
      }
      std::vector<int64_t> all(count * static_cast<size_t>(world));
      group.all_gather(in_bytes(mine), out_bytes(all), DType::kInt64);
      for (size_t i = 0; i < all.size(); ++i) {
        const auto owner = static_cast<int64_t>(i / count);
        require(all[i] == (owner + 1) * static_cast<int64_t>(i % count + 1),
                format("all_gather at {}", i));
      }
      // Rank r contributes (r + 1) * (j + 1) at j, so each rank's part of every slice is needed.
      std::vector<int64_t> wide(all.size());
      for (size_t j = 0; j < wide.size(); ++j) wide[j] = (rank + 1) * static_cast<int64_t>(j + 1);
      std::vector<int64_t> slice(count);
      group.reduce_scatter(in_bytes(wide), out_bytes(slice), DType::kInt64, ReduceOp::kSum);
      for (size_t i = 0; i < count; ++i) {
        const auto j = static_cast<size_t>(rank) * count + i;
        require(slice[i] == factor * static_cast<int64_t>(j + 1),
                format("reduce_scatter at {}", i));
      }
      std::vector<int64_t> data = mine;
      group.broadcast(out_bytes(data), DType::kInt64, world - 1);
      for (size_t i = 0; i < count; ++i) {
        require(data[i] == world * static_cast<int64_t>(i + 1), format("broadcast at {}", i));
      }
      group.barrier();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank r contributes r + 1 and multiplies it by (r + 2) / 2. The result is exact in every dtype and
// in every order.
TEST_P(CommunicatorTest, APremulSumMultipliesEachRanksInputByItsOwnFactor) {
  const auto result = run([](RankContext& context, Communicator& group) {
    const int world = context.world_size;
    const Reduction premul_sum = Reduction::premul_sum((context.rank + 2) / 2.0);
    double expected = 0;
    for (int rank = 0; rank < world; ++rank) expected += (rank + 1) * (rank + 2) / 2.0;
    for (const size_t count : {0UL, 1UL, 7UL, 30'001UL}) {
      const std::vector<double> mine(count, context.rank + 1.0);
      std::vector<double> out(count);
      group.all_reduce(in_bytes(mine), out_bytes(out), DType::kFloat64, premul_sum);
      require(out == std::vector<double>(count, expected), "all_reduce");
      require(mine == std::vector<double>(count, context.rank + 1.0), "the input is as it was");
      out = mine;
      group.all_reduce_async(in_bytes(out), out_bytes(out), DType::kFloat64, premul_sum).wait();
      require(out == std::vector<double>(count, expected), "all_reduce in place");
      const std::vector<double> whole(count * static_cast<size_t>(world), context.rank + 1.0);
      std::vector<double> part(count);
      group.reduce_scatter(in_bytes(whole), out_bytes(part), DType::kFloat64, premul_sum);
      require(part == std::vector<double>(count, expected), "reduce_scatter");
    }
    require(to_json(group.flight_record()).find("premul_sum") != std::string::npos,
            "it is recorded by its own name");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A program that fills in a Collective may set a reduction even if the kind does not reduce. Such a
// reduction is ignored.
TEST_P(CommunicatorTest, TheReductionOfWhatDoesNotReduceDoesNotCount) {
  const RanksResult result = run([](RankContext& context, Communicator& group) {
    for (const Reduction& unused : {Reduction::premul_sum(10), Reduction(ReduceOp::kPremulSum)}) {
      std::vector<float> own = {1.0f + static_cast<float>(context.rank.value), 2};
      std::vector<float> all(2 * static_cast<size_t>(context.world_size));
      Collective gather = Collective::all_gather(in_bytes(own), out_bytes(all), DType::kFloat32);
      gather.reduction = unused;
      group.run(gather);
      for (size_t r = 0; r < static_cast<size_t>(context.world_size); ++r) {
        require(all[2 * r] == 1.0f + static_cast<float>(r) && all[2 * r + 1] == 2, "all_gather");
      }
      std::vector<int64_t> sent = {7, 8};
      Collective broadcast = Collective::broadcast(out_bytes(sent), DType::kInt64, 0);
      broadcast.reduction = unused;
      group.run(broadcast);
      require(sent == std::vector<int64_t>{7, 8}, "broadcast");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// run() must not change the caller's list. It resets buffers that this rank does not use, such as
// the output of a reduce on other ranks than the root, in a copy.
TEST_P(CommunicatorTest, AListOfCollectivesCanBeRunAgain) {
  const RanksResult result = run([](RankContext& context, Communicator& group) {
    std::vector<float> in = {1, 2};
    std::vector<float> out = {0, 0};
    std::vector<Collective> list = {
        Collective::reduce(in_bytes(in), out_bytes(out), DType::kFloat32, ReduceOp::kSum, 0)};
    for (int root = 0; root < context.world_size; ++root) {
      list[0].root = root;
      group.run(list);
    }
    require(out[0] == static_cast<float>(context.world_size), "the sum on its root");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, APremulSumWithoutAFactorIsRefused) {
  const auto result = run([](RankContext& context, Communicator& group) {
    std::vector<float> data(3, 1);
    const std::string said = testing::failure_of([&] {
      group.all_reduce(in_bytes(data), out_bytes(data), DType::kFloat32, ReduceOp::kPremulSum);
    });
    require(
        said == format("kInvalidArgument: all_reduce on group \"world\", rank {}: premul_sum needs "
                       "this rank's factor; pass Reduction::premul_sum(factor)",
                       context.rank),
        said);
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, SizesOfAnotherNumberOfElementsAreRefused) {
  const auto result = run([](RankContext& context, Communicator& group) {
    std::vector<float> data(6, 1);
    const auto reduce_as = [&](const std::vector<int64_t>& sizes) {
      return testing::failure_of([&] {
        Collective collective = Collective::all_reduce(in_bytes(data), out_bytes(data),
                                                       DType::kFloat32, ReduceOp::kMax);
        collective.shape = sizes;
        group.run(collective);
      });
    };
    require(reduce_as({2, 4}) ==
                format("kInvalidArgument: all_reduce on group \"world\", rank {}: the shape has 8 "
                       "elements, but the buffer of this shape has 6; pass a shape that fits",
                       context.rank),
            reduce_as({2, 4}));
    require(reduce_as({2, 3}).empty(), "as many as the buffer has");
    require(to_json(group.flight_record()).find("all_reduce(max, float32 x [2, 3])") !=
                std::string::npos,
            "it is recorded with its shape");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A SUM on one rank and a PREMUL_SUM on the other are a mismatch.
TEST(CommunicatorMismatchTest, ASumIsNoPremulSum) {
  CommunicatorOptions options;
  options.timeout = kBudget;
  const auto result = run_group(2, options, [](RankContext& context, Communicator& group) {
    std::vector<float> data(3, 1);
    const bool is_premul = context.rank == 1;
    const std::string said = testing::failure_of([&] {
      group.all_reduce(in_bytes(data), out_bytes(data), DType::kFloat32,
                       is_premul ? Reduction::premul_sum(2) : ReduceOp::kSum);
    });
    require(said.starts_with("kInvalidArgument") &&
                said.find("all_reduce(sum, float32 x 3)") != std::string::npos &&
                said.find("all_reduce(premul_sum, float32 x 3)") != std::string::npos,
            said);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, AsynchronousOperationsCompleteInOrderAndKeepTheirOwnersAlive) {
  const auto result = run([](RankContext& context, Communicator& group) {
    constexpr size_t kNumWorks = 50;
    std::vector<std::vector<float>> buffers(kNumWorks);
    std::vector<Work> works;
    auto owner = std::make_shared<int>(0);
    const std::weak_ptr<int> watch = owner;
    for (size_t i = 0; i < kNumWorks; ++i) {
      buffers[i].assign(100 + i, static_cast<float>(i));
      works.push_back(group.all_reduce_async(in_bytes(buffers[i]), out_bytes(buffers[i]),
                                             DType::kFloat32, ReduceOp::kSum,
                                             {.keep_alive = owner}));
    }
    owner.reset();
    works.back().wait();
    for (size_t i = 0; i < kNumWorks; ++i) {
      require(works[i].is_completed(), "works before the last one are done");
      require(!works[i].error(), "and well");
      const float expected = static_cast<float>(i) * static_cast<float>(context.world_size);
      for (const float value : buffers[i]) require(value == expected, "sum");
    }
    require(watch.expired(), "owners are released when the operations are done");
    works.front().wait(context.system.deadline_in(milliseconds(1)));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two of the collectives need a scaled copy of their input, and the output of one reduce_scatter is
// too small for that copy.
TEST_P(CommunicatorTest, CollectivesThatAreSubmittedTogetherGiveWhatEachGivesAlone) {
  const auto result = run([](RankContext& context, Communicator& group) {
    const auto world = static_cast<size_t>(context.world_size);
    const auto mine = static_cast<float>(context.rank.value + 1);
    const auto sum = static_cast<float>(world * (world + 1) / 2);
    for (const bool is_async : {false, true}) {
      std::vector<float> reduced(1000, mine);
      std::vector<float> gathered(world);
      std::vector<float> long_input(world * 5000, mine);
      std::vector<float> short_input(world, mine);
      std::vector<float> long_part(5000);
      std::vector<float> short_part(1);
      const std::vector<float> own = {mine};
      std::array<Collective, 4> calls = {
          Collective::all_reduce(in_bytes(reduced), out_bytes(reduced), DType::kFloat32,
                                 ReduceOp::kSum),
          Collective::reduce_scatter(in_bytes(long_input), out_bytes(long_part), DType::kFloat32,
                                     Reduction::premul_sum(2)),
          Collective::reduce_scatter(in_bytes(short_input), out_bytes(short_part), DType::kFloat32,
                                     Reduction::premul_sum(3)),
          Collective::all_gather(in_bytes(own), out_bytes(gathered), DType::kFloat32)};
      const uint64_t num_before = group.num_collectives();
      if (is_async) {
        group.issue(calls).wait();
      } else {
        group.run(calls);
      }
      require(group.num_collectives() == num_before + 4, "as many numbers as collectives");
      for (const float value : reduced) require(value == sum, "all_reduce");
      for (const float value : long_part) require(value == 2 * sum, "the long reduce_scatter");
      require(short_part[0] == 3 * sum, "the short reduce_scatter");
      for (size_t r = 0; r < world; ++r)
        require(gathered[r] == static_cast<float>(r + 1), "gather");
    }
    const FlightRecord record = group.flight_record();
    require(record.entries.size() == 8, "a record of each collective");
    for (size_t i = 0; i < 8; ++i) require(record.entries[i].number == i + 1, "their numbers");
    const std::string said = testing::failure_of([&] { group.run(std::span<Collective>()); });
    require(said.starts_with("kInvalidArgument: run on group \"world\", rank ") &&
                said.ends_with(": the list of collectives is empty; pass at least one"),
            said);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two ranks run a list of collectives, one of which differs. The error names that collective, and
// those before it have succeeded.
TEST(CommunicatorMismatchTest, OfACallOfSeveralTheOneThatDiffersIsNamed) {
  CommunicatorOptions options;
  options.timeout = kBudget;
  for (const TransportChoice transport : {TransportChoice::kSharedMemory, TransportChoice::kTcp}) {
    options.transport = transport;
    const auto result = run_group(2, options, [](RankContext& context, Communicator& group) {
      std::vector<float> first(3, 1);
      std::vector<float> second(context.rank == 1 ? 5 : 4, 1);
      std::array<Collective, 3> calls = {Collective::all_reduce(in_bytes(first), out_bytes(first),
                                                                DType::kFloat32, ReduceOp::kSum),
                                         Collective::all_reduce(in_bytes(second), out_bytes(second),
                                                                DType::kFloat32, ReduceOp::kSum),
                                         Collective::barrier()};
      const std::string said = testing::failure_of([&] { group.run(calls); });
      require(said.starts_with("kInvalidArgument") && said.find("#2") != std::string::npos &&
                  said.find("float32 x 4") != std::string::npos &&
                  said.find("float32 x 5") != std::string::npos,
              said);
      require(first[0] == 2, "the first collective of the call");
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Rank 1 does not make the first call, so rank 0 reaches its timeout.
TEST(CommunicatorTimeoutTest, ACallTakesADurationInPlaceOfADeadline) {
  const auto result = testing::run_ranks_as_threads(2, [](testing::RankContext& context) {
    const auto group = testing::connect_ranks(context);
    std::array<std::byte, 4> data{};
    const Rank other = 1 - context.rank.value;
    const auto refusal = [&](const CollectiveOptions& options) {
      const std::string text = testing::failure_of([&] { group->barrier(options); });
      EXPECT_EQ(testing::failure_of([&] { group->recv(data, DType::kUint8, other, 0, options); }),
                text.substr(0, 18) + "recv" + text.substr(25));
      return text;
    };
    const std::string where =
        format("kInvalidArgument: barrier on group \"world\", rank {}: ", context.rank);
    EXPECT_EQ(refusal({.timeout = milliseconds(-5)}),
              where + "the timeout is -5 ms; pass a positive one, or leave it out for the default");
    EXPECT_EQ(refusal({.deadline = context.system.deadline_in(kBudget), .timeout = kBudget}),
              where + "the options have a deadline and a timeout; pass one of them");
    group->barrier({.timeout = kBudget});
    if (context.rank == 0) {
      const TimePoint begin = context.system.now();
      EXPECT_EQ(testing::failed_fields_of([&] { group->barrier({.timeout = milliseconds(100)}); }),
                "kTimeout culprit=1 operation=barrier#2");
      EXPECT_LT(context.system.now() - begin, testing::kRankTimeout / 2);
    } else {
      while (!group->error()) {
        context.system.make_waiter()->park(context.system.deadline_in(milliseconds(5)));
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, DroppedWorkCompletesBeforeTheNextBlockingCall) {
  const auto result = run([](RankContext& context, Communicator& group) {
    std::vector<int32_t> data(1000, 1);
    {
      const Work dropped =
          group.all_reduce_async(in_bytes(data), out_bytes(data), DType::kInt32, ReduceOp::kSum);
    }
    group.barrier();
    require(data[999] == context.world_size, "the dropped work ran first");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, SymmetricMemoryIsZeroedReducedInPlaceAndOutlivesTheGroup) {
  const auto result = run([](RankContext& context, Communicator& group) {
    const size_t count = 300'000;
    const auto buffer = group.allocate_symmetric(count * sizeof(float));
    const std::span<float> values(reinterpret_cast<float*>(buffer->local().data()), count);
    for (const float value : values) require(value == 0.0F, "zeroed");
    for (int round = 1; round <= 3; ++round) {
      for (size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(context.rank + 1) * static_cast<float>(i % 13);
      }
      group.all_reduce(buffer->local(), buffer->local(), DType::kFloat32, ReduceOp::kSum);
      const int factor = context.world_size * (context.world_size + 1) / 2;
      for (size_t i = 0; i < count; ++i) {
        require(values[i] == static_cast<float>(factor) * static_cast<float>(i % 13), "sum");
      }
    }
    group.close(context.system.deadline_in(kBudget));
    values[count - 1] = 5.0F;
    require(values[count - 1] == 5.0F, "the memory is still there");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Returns the allocated bytes of all shared segments of this process.
int64_t num_allocated_bytes() {
  std::map<ino_t, int64_t> segments;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    struct stat info {};
    std::error_code failure;
    const std::string target = std::filesystem::read_symlink(entry.path(), failure).string();
    if (target.find("memfd:cadre") == std::string::npos) continue;
    if (::stat(entry.path().c_str(), &info) == 0) segments[info.st_ino] = info.st_blocks * 512;
  }
  int64_t total = 0;
  for (const auto& [inode, num_bytes] : segments) total += num_bytes;
  return total;
}

// Memory is reserved before it is used. Without that, the first access would end the process with
// SIGBUS if there is no memory.
TEST(CommunicatorReserveTest, SymmetricMemoryIsAllocatedBeforeItIsTouchedAndGivenBack) {
  CommunicatorOptions options;
  options.transport = TransportChoice::kSharedMemory;
  const auto result = run_group(2, options, [](RankContext&, Communicator& group) {
    constexpr int64_t kBytesPerRank = int64_t{257} * 4096;
    constexpr int64_t kSignals = 4096;
    group.barrier();
    const int64_t before = num_allocated_bytes();
    group.barrier();
    auto buffer = group.allocate_symmetric(kBytesPerRank);
    group.barrier();
    const int64_t with_buffer = num_allocated_bytes();
    require(with_buffer == before + 2 * (kBytesPerRank + kSignals),
            format("{} bytes, {} before", with_buffer, before));
    group.barrier();
    buffer.reset();
    group.barrier();
    // The last rank that releases a piece is not its owner. The owner reclaims the piece at its
    // next allocation.
    buffer = group.allocate_symmetric(1);
    group.barrier();
    const int64_t after = num_allocated_bytes();
    require(after == before + 2 * (4096 + kSignals), format("{} bytes, {} before", after, before));
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(CommunicatorTest, NothingIsLeftAfterClose) {
  const testing::Resources before = testing::count_resources();
  const auto result = run([](RankContext&, Communicator& group) {
    std::vector<float> data(10, 1);
    group.all_reduce_async(in_bytes(data), out_bytes(data), DType::kFloat32, ReduceOp::kSum).wait();
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(testing::leftovers_since(before), "");
}

INSTANTIATE_TEST_SUITE_P(Host, CommunicatorTest,
                         ::testing::Values(Case{TransportChoice::kAuto, 1},
                                           Case{TransportChoice::kAuto, 2},
                                           Case{TransportChoice::kSharedMemory, 4}));

INSTANTIATE_TEST_SUITE_P(Tcp, CommunicatorTest,
                         ::testing::Values(Case{TransportChoice::kTcp, 2},
                                           Case{TransportChoice::kTcp, 3}));

}  // namespace
}  // namespace cadre
