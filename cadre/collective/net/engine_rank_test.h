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
      : system_(system), engine_(system, transport, table) {}

  OpProgress& progress() { return progress_; }
  void set_patience(Duration patience) { patience_ = patience; }

  Status all_reduce(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return engine_.all_reduce(next({OpKind::kAllReduce, dtype, op, 0, in.size() / size_of(dtype)}),
                              in, out, dtype, op);
  }
  Status reduce_scatter(ConstBytes in, Bytes out, DType dtype, ReduceOp op) {
    return engine_.reduce_scatter(
        next({OpKind::kReduceScatter, dtype, op, 0, out.size() / size_of(dtype)}), in, out, dtype,
        op);
  }
  Status all_gather(ConstBytes in, Bytes out) {
    return engine_.all_gather(next({.kind = OpKind::kAllGather, .count = in.size()}), in, out);
  }
  Status broadcast(Bytes data, Rank root) {
    return engine_.broadcast(next({.kind = OpKind::kBroadcast, .root = root, .count = data.size()}),
                             data, root);
  }
  // `out` of other ranks than the root may be empty.
  Status reduce(ConstBytes in, Bytes out, ReduceKind kind, Rank root) {
    const OpContext op =
        next({OpKind::kReduce, kind.dtype, kind.op, root, in.size() / size_of(kind.dtype)});
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
    return {++number_, descriptor.fingerprint(), system_.deadline_in(patience_), progress_};
  }

  os::System& system_;
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
