// Tests the sizes at which each operation changes its algorithm, both in the table and in the
// engine. Both algorithms give the right result, so no test of results would detect a wrong choice.
#include "cadre/core/collective/net/chooser.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/engine_rank.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {
namespace {

using testing::TransportGroup;
using testing::TransportKind;

constexpr int kChooserRanks = 4;  // a tree, a chain and a ring differ on 4 ranks
constexpr size_t kPart = 96;      // the size in bytes of one rank's part
using Line = uint64_t CrossoverTable::*;

struct Crossover {
  const char* name;
  Line line;
  uint64_t num_bytes;  // the size that the engine compares with the crossover
  std::function<Status(EngineRank&, Bytes all)> call;
};

Bytes part_of(Bytes all) {
  return all.first(kPart);
}

const std::vector<Crossover> kCrossovers = {
    {"all_reduce", &CrossoverTable::all_reduce_ring_bytes, kPart,
     [](EngineRank& engine, Bytes all) {
       return engine.all_reduce(part_of(all), part_of(all), DType::kFloat32, ReduceOp::kSum);
     }},
    {"all_reduce of float16, which travels as float32", &CrossoverTable::all_reduce_ring_bytes,
     2 * kPart,
     [](EngineRank& engine, Bytes all) {
       return engine.all_reduce(part_of(all), part_of(all), DType::kFloat16, ReduceOp::kSum);
     }},
    {"reduce", &CrossoverTable::all_reduce_ring_bytes, kPart,
     [](EngineRank& engine, Bytes all) {
       return engine.reduce(part_of(all), part_of(all), {DType::kFloat32, ReduceOp::kSum}, 1);
     }},
    {"broadcast", &CrossoverTable::broadcast_chain_bytes, kPart,
     [](EngineRank& engine, Bytes all) { return engine.broadcast(part_of(all), 1); }},
    {"all_gather", &CrossoverTable::all_gather_ring_bytes, kChooserRanks* kPart,
     [](EngineRank& engine, Bytes all) {
       const std::vector<std::byte> own(kPart);
       return engine.all_gather(own, all);
     }},
    {"gather", &CrossoverTable::gather_linear_bytes, kChooserRanks* kPart,
     [](EngineRank& engine, Bytes all) {
       const std::vector<std::byte> own(kPart);
       return engine.gather(own, all, 1);
     }},
    {"scatter", &CrossoverTable::gather_linear_bytes, kChooserRanks* kPart,
     [](EngineRank& engine, Bytes all) {
       std::vector<std::byte> own(kPart);
       return engine.scatter(all, own, 1);
     }},
};

// Returns the errors of the operation if the crossover is at `first` bytes on rank 0 and at
// `others` bytes on the other ranks. If the algorithms of the ranks differ, all ranks fail, some of
// them only at the deadline.
std::string failure_of(const Crossover& crossover, uint64_t first, uint64_t others,
                       Duration patience = std::chrono::seconds(20)) {
  const auto system = os::make_native_system();
  const TransportGroup group(*system, TransportKind::kShm, kChooserRanks);
  return group.run([&](Transport& transport) {
    CrossoverTable table;
    table.*crossover.line = transport.rank() == 0 ? first : others;
    EngineRank engine(*system, transport, table);
    engine.set_patience(patience);
    std::vector<std::byte> all(kChooserRanks * kPart);
    crossover.call(engine, all).value_or_throw();
  });
}

TEST(Chooser, EachOperationCrossesAtTheBytesOfItsLine) {
  constexpr uint64_t kAlways = 0, kNever = uint64_t{1} << 40;
  for (const Crossover& crossover : kCrossovers) {
    SCOPED_TRACE(crossover.name);
    EXPECT_EQ(failure_of(crossover, crossover.num_bytes, kAlways), "");
    EXPECT_EQ(failure_of(crossover, crossover.num_bytes + 1, kNever), "");
    EXPECT_NE(failure_of(crossover, kNever, kAlways, std::chrono::milliseconds(100)), "")
        << "ranks with different algorithms did not fail, so this test detects nothing";
  }
}

TEST(Chooser, TwoRanksBroadcastInOneMessage) {
  const CrossoverTable table;
  const uint64_t num_bytes = table.broadcast_chain_bytes;
  const auto choice = [&](int world_size) {
    return choose({.kind = OpKind::kBroadcast, .num_bytes = num_bytes, .world_size = world_size},
                  table);
  };
  EXPECT_EQ(choice(2), Algorithm::kBinomialTree);
  EXPECT_EQ(choice(3), Algorithm::kChain);
}

TEST(Chooser, RingsOfManyRanksNeedMoreBytes) {
  const CrossoverTable table;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kAllGather}) {
    const uint64_t line =
        kind == OpKind::kAllGather ? table.all_gather_ring_bytes : table.all_reduce_ring_bytes;
    for (const auto& [world_size, factor] : {std::pair{2, 1}, {8, 1}, {16, 2}, {1024, 128}}) {
      SCOPED_TRACE(world_size);
      const uint64_t crossover = line * static_cast<uint64_t>(factor);
      const auto choice = [&](uint64_t num_bytes) {
        return choose({.kind = kind, .num_bytes = num_bytes, .world_size = world_size}, table);
      };
      EXPECT_EQ(choice(crossover), Algorithm::kRing);
      EXPECT_NE(choice(crossover - 1), Algorithm::kRing);
    }
  }
}

TEST(Chooser, ABarrierIsADissemination) {
  EXPECT_EQ(choose({.kind = OpKind::kBarrier, .world_size = 5}, {}), Algorithm::kDissemination);
}

}  // namespace
}  // namespace cadre
