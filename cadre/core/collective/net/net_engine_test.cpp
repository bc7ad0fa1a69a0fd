// Compares every operation, dtype and reduction with formulas, over both transports.
#include "cadre/core/collective/net/net_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <set>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using testing::equal_bytes;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

// The counts are: 0, fewer than there are ranks, odd, and more than one receive takes together with
// the header.
constexpr std::array<uint64_t, 4> kCounts = {0, 1, 7, 4099};
// The crossovers are so small that the largest count uses the second algorithm of each operation.
constexpr CrossoverTable kSmallCrossovers = {.all_reduce_ring_bytes = 16,
                                             .broadcast_chain_bytes = 1000,
                                             .all_gather_ring_bytes = 500,
                                             .chain_segment_bytes = 1000};

// Returns small integers whose sums are exact in every dtype, so that every order of additions
// gives the same bits. The factors of products are 1, -1 and 2, so that products are exact, too.
int number_of(int rank, uint64_t index, ReduceOp op) {
  const uint64_t mixed = static_cast<uint64_t>(rank) * 5 + index * 3 + index / 7;
  if (op == ReduceOp::kProduct) return std::array{1, -1, 2}[mixed % 3];
  return static_cast<int>(mixed % 11);
}

// Returns the elements [begin, begin + count) of the rank's input.
std::vector<std::byte> input_of(int rank, DType dtype, uint64_t count, ReduceOp op = ReduceOp::kSum,
                                uint64_t begin = 0) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    testing::write_number(bytes, i, dtype, number_of(rank, begin + i, op));
  }
  return bytes;
}

// The reference adds in rank order. With these inputs every order gives the same bits.
std::vector<std::byte> reduced(DType dtype, ReduceOp op, int world_size, uint64_t begin,
                               uint64_t count) {
  testing::Inputs inputs;
  for (int rank = 0; rank < world_size; ++rank) {
    inputs.push_back(input_of(rank, dtype, count, op, begin));
  }
  return testing::reference_reduction(inputs, {dtype, op});
}

class NetEngineTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  // Runs the body on every rank of groups of several sizes.
  void for_each_world(const std::function<void(EngineRank&, int rank, int world_size)>& body,
                      const CrossoverTable& table = kSmallCrossovers) {
    for (int world_size = 1; world_size <= kMaxRanks; ++world_size) {
      const TransportGroup group(*system_, GetParam(), world_size);
      const std::string failures = group.run([&](Transport& transport) {
        EngineRank rank(*system_, transport, table);
        body(rank, transport.rank(), world_size);
      });
      ASSERT_EQ(failures, "") << "world size " << world_size;
    }
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

INSTANTIATE_TEST_SUITE_P(All, NetEngineTest,
                         ::testing::Values(TransportKind::kTcp, TransportKind::kShm),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST_P(NetEngineTest, AllReduceOfEveryKindIsTheFormula) {
  for_each_world([](EngineRank& engine, int rank, int world_size) {
    for (const auto& [dtype, op] : testing::reduce_kinds_in(world_size)) {
      for (const uint64_t count : kCounts) {
        const auto in = input_of(rank, dtype, count, op);
        const auto expected = reduced(dtype, op, world_size, 0, count);
        std::vector<std::byte> out(in.size());
        engine.all_reduce(in, out, dtype, op).value_or_throw();
        require(equal_bytes(out, expected), format("wrong: {} {} x {}", op, dtype, count));
        auto in_place = in;
        engine.all_reduce(in_place, in_place, dtype, op).value_or_throw();
        require(equal_bytes(in_place, expected),
                format("wrong in place: {} {} x {}", op, dtype, count));
      }
    }
  });
}

TEST_P(NetEngineTest, ReduceScatterOfEveryKindIsTheFormula) {
  for_each_world([](EngineRank& engine, int rank, int world_size) {
    const auto size = static_cast<uint64_t>(world_size);
    for (const auto& [dtype, op] : testing::reduce_kinds_in(world_size)) {
      for (const uint64_t count : kCounts) {
        auto in = input_of(rank, dtype, count * size, op);
        const auto begin = static_cast<uint64_t>(rank) * count;
        const auto expected = reduced(dtype, op, world_size, begin, count);
        std::vector<std::byte> out(count * size_of(dtype));
        engine.reduce_scatter(in, out, dtype, op).value_or_throw();
        require(equal_bytes(out, expected), format("wrong: {} {} x {}", op, dtype, count));
        const Bytes own = Bytes(in).subspan(begin * size_of(dtype), out.size());
        engine.reduce_scatter(in, own, dtype, op).value_or_throw();
        require(equal_bytes(own, expected), format("wrong in place: {} {} x {}", op, dtype, count));
      }
    }
  });
}

TEST_P(NetEngineTest, ReduceOfEveryKindToEveryRootIsTheFormula) {
  for_each_world([](EngineRank& engine, int rank, int world_size) {
    for (const auto& [dtype, op] : testing::reduce_kinds_in(world_size)) {
      for (const uint64_t count : kCounts) {
        const int root = static_cast<int>(count + static_cast<uint64_t>(op)) % world_size;
        const auto in = input_of(rank, dtype, count, op);
        const auto expected = reduced(dtype, op, world_size, 0, count);
        std::vector<std::byte> out(rank == root ? in.size() : 0);
        engine.reduce(in, out, {dtype, op}, root).value_or_throw();
        require(rank != root || equal_bytes(out, expected),
                format("wrong: {} {} x {}", op, dtype, count));
        auto in_place = in;
        engine.reduce(in_place, in_place, {dtype, op}, root).value_or_throw();
        require(in_place == (rank == root ? expected : in),
                format("wrong in place: {} {} x {}", op, dtype, count));
      }
    }
  });
}

TEST_P(NetEngineTest, AllGatherConcatenatesInRankOrder) {
  for_each_world([](EngineRank& engine, int rank, int world_size) {
    for (const uint64_t count : kCounts) {
      std::vector<std::byte> expected;
      for (int peer = 0; peer < world_size; ++peer) {
        const auto part = input_of(peer, DType::kInt32, count);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      const auto in = input_of(rank, DType::kInt32, count);
      std::vector<std::byte> out(expected.size());
      engine.all_gather(in, out).value_or_throw();
      require(equal_bytes(out, expected), format("wrong: {} elements", count));
      std::vector<std::byte> in_place(expected.size());
      const Bytes own = Bytes(in_place).subspan(static_cast<size_t>(rank) * in.size(), in.size());
      std::ranges::copy(in, own.begin());
      engine.all_gather(own, in_place).value_or_throw();
      require(equal_bytes(in_place, expected), format("wrong in place: {} elements", count));
    }
  });
}

TEST_P(NetEngineTest, BroadcastFromEveryRoot) {
  for_each_world([](EngineRank& engine, int rank, int world_size) {
    for (int root = 0; root < world_size; ++root) {
      for (const uint64_t count : kCounts) {
        const auto expected = input_of(root, DType::kUint8, count);
        std::vector<std::byte> data(count);
        if (rank == root) data = expected;
        engine.broadcast(data, root).value_or_throw();
        require(data == expected, format("wrong: {} bytes from {}", count, root));
      }
    }
  });
}

TEST_P(NetEngineTest, LargeBuffersWithTheDefaultTable) {
  constexpr uint64_t kCount = 700'001;
  for (const int world_size : {2, 3}) {
    const TransportGroup group(*system_, GetParam(), world_size);
    const std::string failures = group.run([&](Transport& transport) {
      EngineRank engine(*system_, transport);
      for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
        auto data = input_of(transport.rank(), dtype, kCount);
        engine.all_reduce(data, data, dtype, ReduceOp::kAvg).value_or_throw();
        require(data == reduced(dtype, ReduceOp::kAvg, world_size, 0, kCount), "wrong average");
      }
      auto data = input_of(transport.rank(), DType::kInt64, kCount);
      engine.broadcast(data, 1).value_or_throw();
      require(data == input_of(1, DType::kInt64, kCount), "wrong broadcast");
    });
    EXPECT_EQ(failures, "") << "world size " << world_size;
  }
}

// Recursive doubling adds to the memory that it sends at the same time. Here this memory is larger
// than the channels and the staging buffer.
TEST_P(NetEngineTest, RecursiveDoublingOfMuchInPlace) {
  constexpr uint64_t kCount = 700'001;
  const CrossoverTable never_ring{.all_reduce_ring_bytes = 1 << 30};
  for (const int world_size : {2, 3, 4}) {
    const TransportGroup group(*system_, GetParam(), world_size);
    const std::string failures = group.run([&](Transport& transport) {
      EngineRank engine(*system_, transport, never_ring);
      auto data = input_of(transport.rank(), DType::kInt32, kCount);
      engine.all_reduce(data, data, DType::kInt32, ReduceOp::kSum).value_or_throw();
      require(data == reduced(DType::kInt32, ReduceOp::kSum, world_size, 0, kCount), "wrong sum");
    });
    EXPECT_EQ(failures, "") << "world size " << world_size;
  }
}

// Each rank increments the counter before it enters. No rank may return from the barrier before the
// last rank has entered.
TEST_P(NetEngineTest, NobodyLeavesABarrierBeforeAllHaveEntered) {
  constexpr int kRounds = 20;
  std::array<std::atomic<int>, kMaxRanks + 1> entered{};
  for_each_world([&](EngineRank& engine, int, int world_size) {
    std::atomic<int>& count = entered[static_cast<size_t>(world_size)];
    for (int round = 1; round <= kRounds; ++round) {
      ++count;
      engine.barrier().value_or_throw();
      require(count >= round * world_size, "left too early");
    }
  });
}

}  // namespace
}  // namespace cadre
