// Tests reduce, gather, scatter and all_to_all of the Communicator, blocking and asynchronous, on
// threads over shared memory and over TCP: results, refused arguments, and the errors if ranks make
// different calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/exchange_reference.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::RanksResult;
using testing::require;
using ::testing::StartsWith;

constexpr Duration kExchangeBudget = seconds(20);

struct ExchangeCase {
  TransportChoice transport;
  int world_size;
};

using Body = std::function<void(RankContext&, Communicator&)>;

// Runs `body` on each rank of a group. The output of a rank is the text of its error.
RanksResult run_group(const ExchangeCase& test, const Body& body) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return testing::run_ranks_as_threads(test.world_size, [&](RankContext& context) {
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    const CommunicatorOptions options{.timeout = kExchangeBudget, .transport = test.transport};
    const auto group = Communicator::connect(context.system, membership, options,
                                             context.system.deadline_in(kExchangeBudget));
    context.output = failure_of([&] { body(context, *group); });
    group->close(context.system.deadline_in(kExchangeBudget));
  });
}

class ExchangeCallsTest : public ::testing::TestWithParam<ExchangeCase> {
 protected:
  void expect_on_all(const Body& body) {
    const auto result = run_group(GetParam(), body);
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
  }
};

INSTANTIATE_TEST_SUITE_P(Host, ExchangeCallsTest,
                         ::testing::Values(ExchangeCase{TransportChoice::kAuto, 1},
                                           ExchangeCase{TransportChoice::kAuto, 2},
                                           ExchangeCase{TransportChoice::kSharedMemory, 4}));
INSTANTIATE_TEST_SUITE_P(Tcp, ExchangeCallsTest,
                         ::testing::Values(ExchangeCase{TransportChoice::kTcp, 2},
                                           ExchangeCase{TransportChoice::kTcp, 3}));

// Makes one call, either blocking or asynchronous.
template <typename Blocking, typename Issuing>
void call(bool is_async, Blocking blocking, Issuing issuing) {
  if (is_async) {
    issuing().wait();
  } else {
    blocking();
  }
}

TEST_P(ExchangeCallsTest, ReduceGivesTheRootWhatAllReduceGives) {
  expect_on_all([](RankContext& context, Communicator& group) {
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{200'001}}) {
      std::vector<float> mine(count);
      for (size_t i = 0; i < count; ++i) {
        mine[i] = 1.0F / static_cast<float>(i % 91 + 1 + static_cast<size_t>(context.rank.value));
      }
      const ConstBytes in = std::as_bytes(std::span(mine));
      std::vector<float> expected(count);
      group.all_reduce(in, std::as_writable_bytes(std::span(expected)), DType::kFloat32,
                       ReduceOp::kAvg);
      for (const bool is_async : {false, true}) {
        const Rank root = is_async ? 0 : group.world_size() - 1;
        std::vector<float> out(context.rank == root ? count : 0);
        const Bytes result = std::as_writable_bytes(std::span(out));
        call(
            is_async, [&] { group.reduce(in, result, DType::kFloat32, ReduceOp::kAvg, root); },
            [&] { return group.reduce_async(in, result, DType::kFloat32, ReduceOp::kAvg, root); });
        require(context.rank != root || out == expected, format("reduce of {}", count));
      }
    }
  });
}

TEST_P(ExchangeCallsTest, GatherAndScatterMoveEachRanksPart) {
  expect_on_all([](RankContext& context, Communicator& group) {
    const int world = group.world_size();
    for (const size_t size : {size_t{4}, size_t{50'000}}) {
      for (int root = 0; root < world; ++root) {
        const bool is_async = root % 2 == 1;
        const bool is_root = context.rank == root;
        const auto in = part_between(context.rank, root, size);
        const auto all = gathered(world, root, size);
        std::vector<std::byte> out(is_root ? all.size() : 0);
        call(
            is_async, [&] { group.gather(in, out, DType::kInt32, root); },
            [&] { return group.gather_async(in, out, DType::kInt32, root); });
        require(!is_root || out == all, format("gather of {} to {}", size, root));

        const auto whole = is_root ? to_be_scattered(world, root, size) : std::vector<std::byte>();
        std::vector<std::byte> part(size);
        call(
            is_async, [&] { group.scatter(whole, part, DType::kInt32, root); },
            [&] { return group.scatter_async(whole, part, DType::kInt32, root); });
        require(part == part_between(root, context.rank, size),
                format("scatter of {} from {}", size, root));
      }
    }
  });
}

TEST_P(ExchangeCallsTest, AllToAllMovesEvenAndUnevenParts) {
  expect_on_all([](RankContext& context, Communicator& group) {
    const int world = group.world_size();
    for (const uint64_t size : {uint64_t{8}, uint64_t{60'000}}) {
      for (const bool is_async : {false, true}) {
        const SizeMatrix even = even_sizes(world, size);
        const auto in = exchange_input(even, context.rank);
        std::vector<std::byte> out(in.size());
        call(
            is_async, [&] { group.all_to_all(in, out, DType::kInt64); },
            [&] { return group.all_to_all_async(in, out, DType::kInt64); });
        require(out == exchange_output(even, context.rank), "even");

        const SizeMatrix sizes = random_sizes(world, size, size);
        const auto sent = exchange_input(sizes, context.rank);
        const auto expected = exchange_output(sizes, context.rank);
        std::vector<std::byte> received(expected.size());
        const SplitCounts splits{.input = sizes[static_cast<size_t>(context.rank.value)],
                                 .output = received_sizes(sizes, context.rank)};
        if (is_async) {
          const Work work = group.all_to_all_v_async(sent, received, DType::kUint8, splits);
          work.wait();
        } else {
          group.all_to_all_v(sent, received, DType::kUint8, splits);
        }
        require(received == expected, "uneven");
      }
    }
  });
}

// Gathers parts of different sizes. Some ranks contribute no elements, and some calls are in place.
TEST_P(ExchangeCallsTest, AllGatherVMovesPartsOfAnySizes) {
  expect_on_all([](RankContext& context, Communicator& group) {
    const auto me = static_cast<size_t>(context.rank.value);
    for (const uint64_t size : {uint64_t{0}, uint64_t{3}, uint64_t{70'000}}) {
      std::vector<uint64_t> counts;
      std::vector<int32_t> expected;
      size_t begin = 0;
      for (int rank = 0; rank < group.world_size(); ++rank) {
        counts.push_back(rank % 3 == 1 ? 0 : size + static_cast<uint64_t>(rank));
        if (rank == context.rank) begin = expected.size();
        for (uint64_t i = 0; i < counts.back(); ++i) {
          expected.push_back(static_cast<int32_t>(i * 7 + static_cast<uint64_t>(rank)));
        }
      }
      const auto first = expected.begin() + static_cast<ptrdiff_t>(begin);
      const std::vector<int32_t> in(first, first + static_cast<ptrdiff_t>(counts[me]));
      for (const bool is_async : {false, true}) {
        std::vector<int32_t> out(expected.size());
        std::copy(in.begin(), in.end(), out.begin() + static_cast<ptrdiff_t>(begin));
        const Bytes all = std::as_writable_bytes(std::span(out));
        const ConstBytes own =
            is_async
                ? std::as_bytes(std::span(in))
                : ConstBytes(all.subspan(begin * sizeof(int32_t), counts[me] * sizeof(int32_t)));
        call(
            is_async, [&] { group.all_gather_v(own, all, DType::kInt32, counts); },
            [&] { return group.all_gather_v_async(own, all, DType::kInt32, counts); });
        require(out == expected, format("parts of about {}", size));
      }
    }
  });
}

// Reduces and scatters parts of different sizes. Some ranks get no elements, and some calls are in
// place.
TEST_P(ExchangeCallsTest, ReduceScatterVReducesPartsOfAnySizes) {
  expect_on_all([](RankContext& context, Communicator& group) {
    const auto me = static_cast<size_t>(context.rank.value);
    const int num_ranks = group.world_size();
    for (const uint64_t size : {uint64_t{0}, uint64_t{3}, uint64_t{70'000}}) {
      std::vector<uint64_t> counts;
      size_t total = 0;
      size_t begin = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (rank == context.rank) begin = total;
        counts.push_back(rank % 3 == 1 ? 0 : size + static_cast<uint64_t>(rank));
        total += counts.back();
      }
      for (const bool is_async : {false, true}) {
        std::vector<int32_t> in(total);
        for (size_t i = 0; i < total; ++i) in[i] = static_cast<int32_t>(i * 7 + me);
        std::vector<int32_t> out(counts[me]);
        const Bytes whole = std::as_writable_bytes(std::span(in));
        const Bytes part =
            is_async ? std::as_writable_bytes(std::span(out))
                     : whole.subspan(begin * sizeof(int32_t), counts[me] * sizeof(int32_t));
        call(
            is_async,
            [&] { group.reduce_scatter_v(whole, part, DType::kInt32, ReduceOp::kSum, counts); },
            [&] {
              return group.reduce_scatter_v_async(whole, part, DType::kInt32, ReduceOp::kSum,
                                                  counts);
            });
        const int32_t* result = is_async ? out.data() : in.data() + begin;
        for (size_t i = 0; i < counts[me]; ++i) {
          const auto sum = static_cast<int32_t>(num_ranks * static_cast<int>((begin + i) * 7) +
                                                num_ranks * (num_ranks - 1) / 2);
          require(result[i] == sum, format("element {} of parts of about {}", i, size));
        }
      }
    }
  });
}

// The flight record shows each call by its fingerprint, with dtype, count and root.
TEST_P(ExchangeCallsTest, TheRecordTellsTheCalls) {
  expect_on_all([](RankContext&, Communicator& group) {
    const auto world = static_cast<size_t>(group.world_size());
    std::vector<std::byte> small(8);
    std::vector<std::byte> large(8 * world);
    std::vector<std::byte> other(8 * world);
    group.reduce(small, small, DType::kFloat32, ReduceOp::kMax, 0);
    group.gather(small, large, DType::kInt32, 0);
    group.scatter(large, small, DType::kInt32, 0);
    group.all_to_all(large, other, DType::kInt32);
    const std::vector<uint64_t> counts(world, 8);
    group.all_to_all_v(large, other, DType::kUint8, {counts, counts});
    const std::string json = to_json(group.flight_record());
    for (const std::string& text : {std::string("\"reduce(max, float32 x 2, root 0)\""),
                                    std::string("\"gather(int32 x 2, root 0)\""),
                                    std::string("\"scatter(int32 x 2, root 0)\""),
                                    format("\"all_to_all(int32 x {})\"", 2 * world),
                                    std::string("\"all_to_all_v(uint8)\"")}) {
      require(json.find(text) != std::string::npos, text + " is not in " + json);
    }
  });
}

// Turns "CALL: PROBLEM" into the full text of the error that the rank must throw.
std::string refusal_text(Rank rank, const std::string& text) {
  const size_t at = text.find(": ");
  return format("kInvalidArgument: {} on group \"world\", rank {}{}", text.substr(0, at), rank,
                text.substr(at));
}

// Buffers that overlap without being in place are refused, because an input could be overwritten
// while it is still read.
TEST(ExchangeCallsRefusal, BuffersThatOverlapButNotInPlaceAreRefused) {
  const auto result = run_group({TransportChoice::kAuto, 2}, [](RankContext& context,
                                                                Communicator& group) {
    const Rank me = context.rank;
    const auto expect = [me](const std::function<void()>& body, const std::string& text) {
      const std::string failure = failure_of(body);
      require(failure == refusal_text(me, text), failure);
    };
    std::vector<std::byte> wide(24);
    const Bytes whole = Bytes(wide).first(16);
    const Bytes shifted = Bytes(wide).subspan(8);
    const Bytes slice = Bytes(wide).subspan(4, 8);  // does not match the slice of any rank
    const std::string both =
        "overlap, but not in place (in place means that both are the same memory); pass separate "
        "buffers";
    const std::string shorter =
        "overlap, but not in place (in place means that the shorter one is this rank's slice of "
        "the other); pass separate buffers";
    expect([&] { group.all_reduce(whole, shifted, DType::kUint8, ReduceOp::kSum); },
           "all_reduce: the input and the output " + both);
    expect([&] { group.reduce(shifted, whole, DType::kUint8, ReduceOp::kSum, me); },
           "reduce: the input and the output " + both);
    expect([&] { group.all_gather(slice, whole, DType::kUint8); },
           "all_gather: the input and the output " + shorter);
    expect([&] { group.reduce_scatter(whole, slice, DType::kUint8, ReduceOp::kSum); },
           "reduce_scatter: the input and the output " + shorter);
    expect([&] { group.gather(slice, whole, DType::kUint8, me); },
           "gather: the input and the output " + shorter);
    expect([&] { group.scatter(whole, slice, DType::kUint8, me); },
           "scatter: the input and the output " + shorter);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
}

TEST(ExchangeCallsRefusal, WrongArgumentsAreSaidWithTheirValues) {
  const auto result =
      run_group({TransportChoice::kAuto, 2}, [](RankContext& context, Communicator& group) {
        std::vector<std::byte> ten(10);
        std::vector<std::byte> eight(8);
        const Rank me = context.rank;
        const auto expect = [me](const std::function<void()>& body, const std::string& text) {
          const std::string failure = failure_of(body);
          require(failure == refusal_text(me, text), failure);
        };
        expect([&] { group.reduce(ten, ten, DType::kFloat32, ReduceOp::kSum, 0); },
               "reduce: 10 bytes are not a whole number of float32 elements of 4 bytes");
        expect([&] { group.reduce(ten, ten, DType::kUint8, ReduceOp::kSum, -1); },
               "reduce: root -1 is not in the group of 2 ranks");
        expect([&] { group.reduce(ten, eight, DType::kUint8, ReduceOp::kSum, me); },
               "reduce: the output has 8 bytes, expected 10");
        expect([&] { group.gather(eight, eight, DType::kUint8, me); },
               "gather: the output has 8 bytes, expected 16");
        expect([&] { group.gather(eight, eight, DType::kUint8, 2); },
               "gather: root 2 is not in the group of 2 ranks");
        expect([&] { group.scatter(ten, eight, DType::kUint8, me); },
               "scatter: the input has 10 bytes, expected 16");
        expect([&] { group.scatter(ten, eight, DType::kUint8, 9); },
               "scatter: root 9 is not in the group of 2 ranks");
        expect([&] { group.all_to_all(eight, ten, DType::kUint8); },
               "all_to_all: the output has 10 bytes, expected 8");
        expect([&] { group.all_to_all(eight, eight, DType::kUint8); },
               "all_to_all: the input and the output overlap; pass separate buffers");
        std::vector<std::byte> odd(9);
        std::vector<std::byte> odd_out(9);
        expect([&] { group.all_to_all(odd, odd_out, DType::kUint8); },
               "all_to_all: 9 elements cannot be divided evenly among 2 ranks; use all_to_all_v");
        const std::vector<uint64_t> four = {4, 4};
        const std::vector<uint64_t> one = {8};
        const std::vector<uint64_t> huge = {~uint64_t{0}, 9};
        expect(
            [&] {
              group.all_to_all_v(eight, ten, DType::kUint8, {one, four});
            },
            "all_to_all_v: 1 counts for the input, expected one for each of 2 ranks");
        expect(
            [&] {
              group.all_to_all_v(eight, ten, DType::kUint8, {four, four});
            },
            "all_to_all_v: the counts for the output add up to 8, but it has 10 uint8");
        expect(
            [&] {
              group.all_to_all_v(eight, ten, DType::kUint8, {huge, four});
            },
            "all_to_all_v: the counts for the input add up to more than its 8 uint8");
        group.barrier();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "");
}

class ExchangeMismatchTest : public ::testing::TestWithParam<TransportChoice> {};

INSTANTIATE_TEST_SUITE_P(All, ExchangeMismatchTest,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp));

// Expects the error on all ranks. A rank whose part of the operation has succeeded learns of the
// failure in its next call.
void expect_on_all(const RanksResult& result, const std::vector<std::string>& texts,
                   const std::string& remedy) {
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, StartsWith("kInvalidArgument: "));
    for (const std::string& text : texts) EXPECT_THAT(rank.output, HasSubstr(text));
    EXPECT_THAT(rank.output, HasSubstr("Remedy: " + remedy));
  }
}

TEST_P(ExchangeMismatchTest, PartsThatDisagreeAreExplainedAlikeOnAllRanks) {
  const auto result = run_group({GetParam(), 3}, [](RankContext& context, Communicator& group) {
    std::vector<uint64_t> counts = {5, 5, 5};
    std::vector<float> in(15);
    if (context.rank == 1) counts[2] = 4;
    std::vector<float> out(context.rank == 1 ? 14 : 15);
    const std::vector<uint64_t> sent = {5, 5, 5};
    group.barrier();
    group.all_to_all_v(std::as_bytes(std::span(in)), std::as_writable_bytes(std::span(out)),
                       DType::kFloat32, {sent, counts});
  });
  expect_on_all(
      result,
      {"all_to_all_v #2 on group \"world\" failed after ", "\n  the ranks disagree: rank 2 (",
       ") sends float32 x 5 to rank 1 (", "), which expects 4. "},
      "let each rank expect from every other rank what that rank sends to it: ");
}

TEST_P(ExchangeMismatchTest, AnotherRootIsExplainedAlikeOnAllRanks) {
  for (const OpKind kind : {OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
    const auto result = run_group({GetParam(), 3}, [&](RankContext& context, Communicator& group) {
      const Rank root = context.rank == 1 ? 1 : 0;
      std::vector<std::byte> small(8);
      std::vector<std::byte> large(24);
      if (kind == OpKind::kReduce) group.reduce(small, small, DType::kInt32, ReduceOp::kSum, root);
      if (kind == OpKind::kGather) group.gather(small, large, DType::kInt32, root);
      if (kind == OpKind::kScatter) group.scatter(large, small, DType::kInt32, root);
      group.barrier();
    });
    const std::string call =
        kind == OpKind::kReduce ? "reduce(sum, int32 x 2" : format("{}(int32 x 2", kind);
    expect_on_all(result, {"the ranks disagree: rank ", format(") called {}, root 1) as #1", call)},
                  "pass the same root on all ranks, ");
  }
}

TEST_P(ExchangeMismatchTest, EvenAgainstUnevenIsExplainedAlikeOnAllRanks) {
  const auto result = run_group({GetParam(), 3}, [](RankContext& context, Communicator& group) {
    std::vector<std::byte> in(12);
    std::vector<std::byte> out(12);
    const std::vector<uint64_t> counts = {4, 4, 4};
    if (context.rank == 2) return group.all_to_all(in, out, DType::kUint8);
    group.all_to_all_v(in, out, DType::kUint8, {counts, counts});
  });
  expect_on_all(result, {"called all_to_all(uint8 x 12) as #1", "called all_to_all_v(uint8) as #1"},
                "pass split sizes on all ranks or on none.");
}

// The counts are compared even if no rank sends any element.
TEST_P(ExchangeMismatchTest, OtherCountsOfAGatherAreExplainedAlikeOnAllRanks) {
  const auto result = run_group({GetParam(), 3}, [](RankContext& context, Communicator& group) {
    std::vector<uint64_t> counts = {0, 0, 0};
    if (context.rank == 1) counts[2] = 4;
    std::vector<std::byte> out(context.rank == 1 ? 4 : 0);
    group.all_gather_v({}, out, DType::kUint8, counts);
  });
  expect_on_all(result,
                {"called all_gather_v(uint8 x [0, 0, 0]) as #1",
                 "called all_gather_v(uint8 x [0, 0, 4]) as #1"},
                "pass the same sizes of parts on all ranks, ");
}

}  // namespace
}  // namespace cadre
