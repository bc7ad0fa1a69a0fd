// Compares gather, scatter and all_to_all of the net engine with formulas over both transports, and
// tests that ranks detect a different root, and a part whose size differs between sender and
// receiver.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/exchange_reference.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using testing::equal_bytes;
using testing::require;
using testing::TransportGroup;
using testing::TransportKind;

// The sizes in bytes are: 0, less than a word, more than one receive takes together with the
// header, and more than a small channel holds.
constexpr size_t kSizes[] = {0, 1, 13, 5001, 70001};
// Larger data is tested only with the last rank as the root.
constexpr size_t kAnyRootBytes = 10000;

class NetExchangeTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  void for_each_world(const CrossoverTable& table,
                      const std::function<void(EngineRank&, int rank, int world_size)>& body) {
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

INSTANTIATE_TEST_SUITE_P(All, NetExchangeTest,
                         ::testing::Values(TransportKind::kTcp, TransportKind::kShm),
                         [](const auto& test) { return std::string(to_string(test.param)); });

void check_gather(EngineRank& engine, int rank, int world_size, size_t size, int root) {
  const bool is_root = rank == root;
  const auto expected = gathered(world_size, root, size);
  const auto in = part_between(rank, root, size);
  std::vector<std::byte> out(is_root ? expected.size() : 0);
  engine.gather(in, out, root).value_or_throw();
  require(!is_root || equal_bytes(out, expected), format("gather of {} to {}", size, root));
  std::vector<std::byte> all(expected.size());
  const Bytes own = Bytes(all).subspan(size * static_cast<size_t>(rank), size);
  std::ranges::copy(in, own.begin());
  engine.gather(own, is_root ? Bytes(all) : Bytes(), root).value_or_throw();
  require(!is_root || equal_bytes(all, expected),
          format("gather in place of {} to {}", size, root));
}

void check_scatter(EngineRank& engine, int rank, int world_size, size_t size, int root) {
  const bool is_root = rank == root;
  auto in = is_root ? to_be_scattered(world_size, root, size) : std::vector<std::byte>();
  const auto expected = part_between(root, rank, size);
  std::vector<std::byte> out(size);
  engine.scatter(in, out, root).value_or_throw();
  require(equal_bytes(out, expected), format("scatter of {} from {}", size, root));
  const Bytes own = is_root ? Bytes(in).subspan(size * static_cast<size_t>(rank), size) : out;
  engine.scatter(in, own, root).value_or_throw();
  require(std::ranges::equal(own, expected), format("scatter in place of {}", size));
}

TEST_P(NetExchangeTest, GatherAndScatterWithEveryRootInBothWays) {
  for (const uint64_t linear_bytes : {uint64_t{0}, uint64_t{1} << 30}) {
    for_each_world({.gather_linear_bytes = linear_bytes},
                   [](EngineRank& engine, int rank, int world_size) {
                     for (int root = 0; root < world_size; ++root) {
                       for (const size_t size : kSizes) {
                         if (size > kAnyRootBytes && root != world_size - 1) continue;
                         check_gather(engine, rank, world_size, size, root);
                         check_scatter(engine, rank, world_size, size, root);
                       }
                     }
                   });
  }
}

TEST_P(NetExchangeTest, AllToAllOfEvenAndOfAnyParts) {
  for_each_world({}, [](EngineRank& engine, int rank, int world_size) {
    for (const size_t size : kSizes) {
      const SizeMatrix even = even_sizes(world_size, size);
      const auto in = exchange_input(even, rank);
      std::vector<std::byte> out(in.size());
      engine.all_to_all(in, out).value_or_throw();
      require(equal_bytes(out, exchange_output(even, rank)), format("all_to_all of {}", size));

      const SizeMatrix sizes = random_sizes(world_size, size + 1, size);
      const auto expected = exchange_output(sizes, rank);
      std::vector<std::byte> received(expected.size());
      engine
          .all_to_all_v(exchange_input(sizes, rank), received,
                        {sizes[static_cast<size_t>(rank)], received_sizes(sizes, rank)})
          .value_or_throw();
      require(equal_bytes(received, expected), format("all_to_all_v of {}", size));
    }
  });
}

// The parts are larger than the channels can hold in both directions at the same time.
TEST_P(NetExchangeTest, LargePartsDoNotBlockEachOther) {
  for (const int world_size : {2, 3}) {
    const TransportGroup group(*system_, GetParam(), world_size);
    const std::string failures = group.run([&](Transport& transport) {
      EngineRank engine(*system_, transport);
      const SizeMatrix sizes = even_sizes(world_size, 8 << 20);
      const auto in = exchange_input(sizes, transport.rank());
      std::vector<std::byte> out(in.size());
      engine.all_to_all(in, out).value_or_throw();
      require(equal_bytes(out, exchange_output(sizes, transport.rank())), "wrong data");
    });
    EXPECT_EQ(failures, "") << "world size " << world_size;
  }
}

TEST_P(NetExchangeTest, APartThatIsNotExpectedIsNamedOnAllRanksBeforeDataMoves) {
  constexpr int kNumRanks = 4;
  const TransportGroup group(*system_, GetParam(), kNumRanks);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    const int rank = transport.rank();
    const SizeMatrix sizes = even_sizes(kNumRanks, 1000);
    auto received = received_sizes(sizes, rank);
    if (rank == 3) received[0] = 1004;
    std::vector<std::byte> out(rank == 3 ? 4004 : 4000);
    const auto status = engine.all_to_all_v(exchange_input(sizes, rank), out,
                                            {sizes[static_cast<size_t>(rank)], received});
    require(!status.ok() && status.error().code() == ErrorCode::kInvalidArgument, "no mismatch");
    const auto& parts = engine.progress().part_mismatch;
    require(parts.sender == 0 && parts.receiver == 3, "the wrong ranks");
    require(parts.sent_bytes == 1000 && parts.expected_bytes == 1004, "the wrong sizes");
    require(std::ranges::all_of(out, [](std::byte b) { return b == std::byte{0}; }), "data moved");
  });
  EXPECT_EQ(failures, "");
}

// Two ranks both call gather with themselves as the root, and wait for each other. When the wait
// gets long they announce their operations, so that no rank waits until the deadline.
TEST_P(NetExchangeTest, RanksThatOnlyWaitForEachOtherFindOut) {
  for (const OpKind kind : {OpKind::kGather, OpKind::kReduce}) {
    const TransportGroup group(*system_, GetParam(), 3);
    const std::string failures = group.run([&](Transport& transport) {
      EngineRank engine(*system_, transport);
      const int root = transport.rank() == 1 ? 1 : 0;
      std::vector<std::byte> small(8);
      std::vector<std::byte> large(24);
      const auto call = [&] {
        return kind == OpKind::kGather
                   ? engine.gather(small, large, root)
                   : engine.reduce(small, small, {DType::kFloat32, ReduceOp::kSum}, root);
      };
      auto status = call();
      // Rank 2 may already have completed the operation. Then it notices the mismatch in the next
      // operation, a barrier.
      if (status.ok() && transport.rank() == 2) status = engine.barrier();
      require(!status.ok(), "it succeeded");
      const ErrorCode code = status.error().code();
      const bool is_told = code == ErrorCode::kAborted && transport.rank() == 2;
      require(code == ErrorCode::kInvalidArgument || is_told, status.error().message());
      if (is_told) return;
      const auto theirs = OpDescriptor::from_fingerprint(engine.progress().mismatch_fingerprint);
      // Rank 1 waits for a part from rank 2. Instead it may receive the header of the next
      // operation of rank 2.
      if (transport.rank() == 1 && theirs.kind == OpKind::kBarrier) return;
      require(theirs.kind == kind, theirs.to_string());
      require(transport.rank() == 2 || theirs.root == 1 - root, theirs.to_string());
    });
    EXPECT_EQ(failures, "") << to_string(kind);
  }
}

// The root waits long for rank 1 and announces its operation to all ranks. If a rank reads the
// announcement only after the operation, the announcement must have no effect.
TEST_P(NetExchangeTest, AnAnnouncementOfAPastOperationIsNoMismatch) {
  const TransportGroup group(*system_, GetParam(), 4);
  const std::string failures = group.run([&](Transport& transport) {
    EngineRank engine(*system_, transport);
    const auto waiter = system_->make_waiter();
    for (int round = 0; round < 20; ++round) {
      const int root = round % 4;
      if (transport.rank() == (root + 1) % 4) waiter->park(system_->deadline_in(milliseconds(15)));
      check_gather(engine, transport.rank(), 4, 100, root);
      if (round % 5 == 4) engine.barrier().value_or_throw();
    }
    const SizeMatrix sizes = even_sizes(4, 3000);
    std::vector<std::byte> out(12000);
    engine.all_to_all(exchange_input(sizes, transport.rank()), out).value_or_throw();
    require(equal_bytes(out, exchange_output(sizes, transport.rank())), "wrong data");
  });
  EXPECT_EQ(failures, "");
}

}  // namespace
}  // namespace cadre
