// One rank of a host group for the tests of the host engine: its engine, its counter of operations.
//
// Threads: one rank each. Blocking: every operation, until its deadline. Lifetime: borrows the
// System. Errors: the Status of the engine.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "cadre/collective/host/host_engine.h"
#include "cadre/os/system.h"
#include "cadre/testing/ranks.h"
#include "cadre/testing/reference_reduction.h"

namespace cadre {

inline constexpr ReduceKind kFloatSum{DType::kFloat32, ReduceOp::kSum};
inline constexpr Duration kPatience = std::chrono::seconds(60);

// Made before the ranks start, so that threads share the mapping and forked processes inherit it.
inline std::shared_ptr<os::SharedMemory> make_segment(size_t num_bytes) {
  return os::make_native_system()->create_segment(num_bytes).value_or_throw();
}

inline const std::vector<std::byte>& of(const testing::Inputs& inputs, Rank rank) {
  return inputs[static_cast<size_t>(rank.value)];
}

class TestRank {
 public:
  TestRank(testing::RankContext& context, std::shared_ptr<os::SharedMemory> arena)
      : system_(context.system),
        interrupt_(context.system),
        engine_(context.system, interrupt_, std::move(arena),
                {.rank = context.rank,
                 .world_size = context.world_size,
                 .oversubscribed = context.world_size > context.system.host().num_cores}) {}

  HostEngine& engine() { return engine_; }
  os::Interrupt& interrupt() { return interrupt_; }
  const OpProgress& progress() const { return progress_; }
  void set_patience(Duration patience) { patience_ = patience; }

  Status all_reduce(ConstBytes in, Bytes out, ReduceKind kind) {
    const OpContext op = next({.kind = OpKind::kAllReduce,
                               .dtype = kind.dtype,
                               .reduce_op = kind.op,
                               .count = in.size() / size_of(kind.dtype)});
    return engine_.all_reduce(op, in, out, kind.dtype, kind.op);
  }
  Status reduce_scatter(ConstBytes in, Bytes out, ReduceKind kind) {
    const OpContext op = next({.kind = OpKind::kReduceScatter,
                               .dtype = kind.dtype,
                               .reduce_op = kind.op,
                               .count = out.size() / size_of(kind.dtype)});
    return engine_.reduce_scatter(op, in, out, kind.dtype, kind.op);
  }
  Status all_gather(ConstBytes in, Bytes out) {
    return engine_.all_gather(next({.kind = OpKind::kAllGather, .count = in.size()}), in, out);
  }
  Status broadcast(Bytes data, Rank root) {
    const OpContext op = next({.kind = OpKind::kBroadcast, .root = root, .count = data.size()});
    return engine_.broadcast(op, data, root);
  }
  // `out` of other ranks than the root may be empty.
  Status reduce(ConstBytes in, Bytes out, ReduceKind kind, Rank root) {
    const OpContext op = next({.kind = OpKind::kReduce,
                               .dtype = kind.dtype,
                               .reduce_op = kind.op,
                               .root = root,
                               .count = in.size() / size_of(kind.dtype)});
    return engine_.reduce(op, in, out, kind.dtype, kind.op, root);
  }
  Status gather(ConstBytes in, Bytes out, Rank root) {
    return engine_.gather(next({.kind = OpKind::kGather, .root = root, .count = in.size()}), in,
                          out, root);
  }
  Status scatter(ConstBytes in, Bytes out, Rank root) {
    return engine_.scatter(next({.kind = OpKind::kScatter, .root = root, .count = out.size()}), in,
                           out, root);
  }
  Status all_to_all(ConstBytes in, Bytes out) {
    return engine_.all_to_all(next({.kind = OpKind::kAllToAll, .count = in.size()}), in, out);
  }
  Status all_to_all_v(ConstBytes in, Bytes out, const PartSizes& sizes) {
    return engine_.all_to_all_v(next({.kind = OpKind::kAllToAllV}), in, out, sizes);
  }
  Status barrier() { return engine_.barrier(next({.kind = OpKind::kBarrier})); }

 private:
  OpContext next(const OpDescriptor& descriptor) {
    return {.number = ++number_,
            .fingerprint = descriptor.fingerprint(),
            .deadline = system_.deadline_in(patience_),
            .progress = progress_};
  }

  os::System& system_;
  os::Interrupt interrupt_;
  HostEngine engine_;
  uint64_t number_ = 0;
  Duration patience_ = kPatience;
  OpProgress progress_;  // of all operations: a test looks at the last one, from any thread
};

// The memory of a group of ranks: an arena, and a segment in which each rank has a slice.
struct TestMemory {
  TestMemory(int num_ranks, size_t slice_bytes)
      : arena(make_segment(HostEngine::arena_bytes(num_ranks))),
        segment(make_segment(static_cast<size_t>(num_ranks) * slice_bytes)),
        bytes_per_rank(slice_bytes) {}

  Bytes slice(Rank rank) const {
    return segment->bytes().subspan(static_cast<size_t>(rank.value) * bytes_per_rank,
                                    bytes_per_rank);
  }

  std::shared_ptr<os::SharedMemory> arena;
  std::shared_ptr<os::SharedMemory> segment;
  size_t bytes_per_rank;
};

}  // namespace cadre
