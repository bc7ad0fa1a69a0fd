// One rank's NetEngine with its counter of operations, and elements of every dtype: for tests.
//
// Threads: one rank each. Blocking: every operation, until its deadline. Lifetime: borrows the
// System and the Transport.
#pragma once

#include <chrono>
#include <vector>

#include "cadre/collective/net/net_engine.h"
#include "cadre/testing/reference_reduction.h"

namespace cadre {

inline constexpr int kMaxRanks = 9;  // of the groups of in-process ranks

class EngineRank {
 public:
  EngineRank(os::System& system, Transport& transport, const CrossoverTable& table = {})
      : system_(system),
        rank_(transport.rank()),
        world_size_(transport.world_size()),
        engine_(system, transport, table) {}

  OpProgress& progress() { return progress_; }
  void set_patience(Duration patience) { patience_ = patience; }

  Status all_reduce(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return run(Collective::all_reduce(in, out, dtype, op));
  }
  Status reduce_scatter(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return run(Collective::reduce_scatter(in, out, dtype, op));
  }
  Status all_gather(ConstBytes in, Bytes out) {
    return run(Collective::all_gather(in, out, DType::kUint8));
  }
  Status broadcast(Bytes data, Rank root) {
    return run(Collective::broadcast(data, DType::kUint8, root));
  }
  // `out` of other ranks than the root may be empty.
  Status reduce(ConstBytes in, Bytes out, ReduceKind kind, Rank root) {
    return run(Collective::reduce(in, out, kind.dtype, kind.op, root));
  }
  Status gather(ConstBytes in, Bytes out, Rank root) {
    return run(Collective::gather(in, out, DType::kUint8, root));
  }
  Status scatter(ConstBytes in, Bytes out, Rank root) {
    return run(Collective::scatter(in, out, DType::kUint8, root));
  }
  Status all_to_all(ConstBytes in, Bytes out) {
    return run(Collective::all_to_all(in, out, DType::kUint8));
  }
  Status all_to_all_v(ConstBytes in, Bytes out, const PartSizes& sizes) {
    return run(Collective::all_to_all_v(in, out, DType::kUint8, {sizes.sent, sizes.received}));
  }
  Status barrier() { return run(Collective::barrier()); }

 private:
  Status run(Collective collective) {
    const auto descriptor = validate(collective, rank_, world_size_);
    if (!descriptor.ok()) return descriptor.error();
    const Fingerprint fingerprint = descriptor->fingerprint();
    return engine_
        .submit({.number = ++number_,
                 .fingerprints = {&fingerprint, 1},
                 .deadline = system_.deadline_in(patience_),
                 .progress = progress_},
                {&collective, 1})
        .status();
  }

  os::System& system_;
  Rank rank_;
  int world_size_;
  NetEngine engine_;
  uint64_t number_ = 0;
  Duration patience_ = std::chrono::seconds(20);
  OpProgress progress_;  // of all operations: a test looks at the last one
};

// A number as an element of the dtype; it must be one that the dtype can hold, but for float16 and
// bfloat16, which round.
inline void append_element(std::vector<std::byte>& bytes, DType dtype, double value) {
  bytes.resize(bytes.size() + size_of(dtype));
  testing::write_number(bytes, bytes.size() / size_of(dtype) - 1, dtype, value);
}

}  // namespace cadre
