// One rank of a host group, for tests of the host engine: its engine and its counter of operations.
//
// Threads: one thread for each rank. Blocking: every operation, until its deadline. Lifetime:
// borrows the System. Errors: the Status that the engine returns.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/collective/host/arena.h"
#include "cadre/core/collective/host/host_engine.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/engine_caller.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/host_memories.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/reference_reduction.h"

namespace cadre {

inline constexpr ReduceKind kFloatSum{DType::kFloat32, ReduceOp::kSum};
inline constexpr Duration kPatience = std::chrono::seconds(60);

inline const std::vector<std::byte>& of(const testing::Inputs& inputs, Rank rank) {
  return inputs[static_cast<size_t>(rank.value)];
}

struct TestMemoryOptions {
  size_t slice_bytes = 0;             // the size of each rank's symmetric memory
  std::vector<size_t> num_free = {};  // how many bytes each rank can commit; empty: no limit
};

// The shared memory of a group of ranks: a block of the arena for each rank, and symmetric memory.
// The test itself has an additional slot and keeps the blocks mapped, so that it can read them
// after the engines were destroyed.
class TestMemory {
 public:
  explicit TestMemory(int num_ranks, const TestMemoryOptions& options = {})
      : slots_(testing::all_slots(num_ranks)), system_(os::make_native_system()) {
    const size_t needed = host::Arena::block_bytes() + options.slice_bytes;
    memories_ = testing::make_host_memories(
        *system_, {.num_slots = num_ranks + 1, .slice_bytes = needed + 4096}, options.num_free);
    const std::vector<int> holders = testing::all_slots(num_ranks + 1);
    for (const int slot : slots_) {
      const auto& memory = memories_[static_cast<size_t>(slot)];
      blocks_.push_back(HostEngine::cut_block(*memory, holders).value_or_throw());
      places_.push_back(blocks_.back().place());
      if (options.slice_bytes == 0) continue;
      slices_.push_back(
          memory->allocate({.num_bytes = options.slice_bytes, .holders = slots_}).value_or_throw());
    }
  }

  // Returns the setup for the engine of the rank. Call it once for each rank.
  HostEngineSetup setup_of(Rank rank) {
    const auto index = static_cast<size_t>(rank.value);
    return {.memory = memories_[index],
            .rank = rank,
            .slots = slots_,
            .blocks = places_,
            .block = std::move(blocks_[index])};
  }
  HostMemory& of(Rank rank) const { return *memories_[static_cast<size_t>(rank.value)]; }
  Bytes slice(Rank rank) const { return slices_[static_cast<size_t>(rank.value)].bytes(); }
  const Place& place(Rank rank) const { return slices_[static_cast<size_t>(rank.value)].place(); }

  host::Arena arena() const {
    std::vector<std::byte*> blocks;
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      blocks.push_back(memories_[0]->resolve({slots_[rank], places_[rank]}, 1));
    }
    return host::Arena(std::move(blocks));
  }
  // Returns whether the staging memory still has only zeros, that is, whether no large operation
  // has used it.
  bool is_staging_untouched() const {
    const host::Arena all = arena();
    const std::vector<std::byte> zeros(host::kChunkBytes);
    for (int rank = 0; rank < static_cast<int>(slots_.size()); ++rank) {
      for (size_t i = 0; i < host::kNumChunks; ++i) {
        if (!testing::equal_bytes({all.chunk(rank, i), host::kChunkBytes}, zeros)) return false;
      }
    }
    return true;
  }

 private:
  const std::vector<int> slots_;
  const std::unique_ptr<os::System> system_;
  std::vector<std::shared_ptr<HostMemory>> memories_;
  std::vector<Piece> blocks_;
  std::vector<Place> places_;
  std::vector<Piece> slices_;
};

class TestRank final : public EngineCaller {
 public:
  TestRank(testing::RankContext& context, TestMemory& memory)
      : TestRank(context, memory.setup_of(context.rank)) {}
  TestRank(testing::RankContext& context, HostEngineSetup setup)
      : EngineCaller(context.system, context.rank, context.world_size),
        engine_(context.system, interrupt_, with_crowding(context, std::move(setup))) {}

  HostEngine& engine() override { return engine_; }
  os::Interrupt& interrupt() { return interrupt_; }

  Status all_reduce(ConstBytes in, Bytes out, ReduceKind kind) {
    return run(Collective::all_reduce(in, out, kind.dtype, kind.op));
  }
  Status reduce_scatter(ConstBytes in, Bytes out, ReduceKind kind) {
    return run(Collective::reduce_scatter(in, out, kind.dtype, kind.op));
  }

 private:
  static HostEngineSetup with_crowding(const testing::RankContext& context, HostEngineSetup setup) {
    setup.oversubscribed = context.world_size > context.system.host().num_cores;
    return setup;
  }

  os::Interrupt interrupt_;
  HostEngine engine_;
};

}  // namespace cadre
