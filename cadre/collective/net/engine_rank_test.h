// One rank's NetEngine with its counter of operations, and elements of every dtype: for tests.
//
// Threads: one rank each. Blocking: every operation, until its deadline. Lifetime: borrows the
// System and the Transport.
#pragma once

#include <bit>
#include <chrono>
#include <cstring>
#include <vector>

#include "cadre/collective/net/net_engine.h"

namespace cadre {

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

inline uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <typename T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof(T));
}

// A number as an element of the dtype; it must be one that the dtype can hold, but for bfloat16,
// which rounds.
inline void append_element(std::vector<std::byte>& bytes, DType dtype, double value) {
  switch (dtype) {
    case DType::kUint8:
      return append(bytes, static_cast<uint8_t>(value));
    case DType::kInt32:
      return append(bytes, static_cast<int32_t>(value));
    case DType::kInt64:
      return append(bytes, static_cast<int64_t>(value));
    case DType::kBfloat16:
      return append(bytes, to_bfloat16(static_cast<float>(value)));
    case DType::kFloat32:
      return append(bytes, static_cast<float>(value));
    case DType::kFloat64:
      return append(bytes, value);
  }
}

}  // namespace cadre
