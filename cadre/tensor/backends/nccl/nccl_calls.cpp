#include "cadre/tensor/backends/nccl/nccl_calls.h"

#include <utility>

#include "cadre/core/collective/reduction_table.h"

namespace cadre::nccl {
namespace {

using Kind = NcclCall::Kind;

class CallList {
 public:
  CallList(const Collective& collective, Rank self, int world_size)
      : c_(collective),
        self_(self.value),
        world_size_(world_size),
        element_bytes_(size_of(collective.dtype)) {}

  std::vector<NcclCall> take() && {
    switch (c_.kind) {
      case OpKind::kBroadcast:
        move_all(Kind::kBroadcast, c_.out.size(), c_.root.value);
        break;
      case OpKind::kAllReduce:
        reduce(Kind::kAllReduce, c_.in.data(), c_.in.size(), 0);
        break;
      case OpKind::kReduce:
        reduce(Kind::kReduce, c_.in.data(), c_.in.size(), c_.root.value);
        break;
      case OpKind::kReduceScatter:
        reduce(Kind::kReduceScatter, c_.in.data(), c_.out.size(), 0);
        break;
      case OpKind::kReduceScatterV:
        reduce_parts();
        break;
      case OpKind::kAllGather:
        move_all(Kind::kAllGather, c_.in.size(), 0);
        break;
      case OpKind::kAllGatherV:
        broadcast_parts();
        break;
      case OpKind::kGather:
        exchange([this](int peer) { return peer == c_.root ? c_.in.size() : 0; },
                 [this](int) { return self_ == c_.root ? c_.in.size() : 0; });
        break;
      case OpKind::kScatter:
        exchange([this](int) { return self_ == c_.root ? c_.out.size() : 0; },
                 [this](int peer) { return peer == c_.root ? c_.out.size() : 0; });
        break;
      case OpKind::kAllToAll: {
        const size_t part = c_.in.size() / static_cast<size_t>(world_size_);
        exchange([part](int) { return part; }, [part](int) { return part; });
        break;
      }
      case OpKind::kAllToAllV:
        exchange([this](int peer) { return bytes_of_part(c_.splits.input, peer); },
                 [this](int peer) { return bytes_of_part(c_.splits.output, peer); });
        break;
      default:  // capabilities() contains no other kind
        break;
    }
    return std::move(calls_);
  }

 private:
  void move_all(Kind kind, size_t num_bytes, int root) {
    add({.kind = kind, .in = c_.in.data(), .out = c_.out.data(), .count = num_bytes, .rank = root});
  }

  void reduce(Kind kind, const std::byte* in, size_t num_bytes, int root) {
    add({.kind = kind,
         .in = in,
         .out = c_.out.data(),
         .count = num_bytes / element_bytes_,
         .type = reduced_type(c_.dtype),
         .rank = root});
  }

  template <typename Counts>
  size_t bytes_of_part(const Counts& counts, int rank) const {
    return static_cast<size_t>(counts[static_cast<size_t>(rank)]) * element_bytes_;
  }

  // Each rank is the root of the reduction of its part.
  void reduce_parts() {
    size_t offset = 0;
    for (int root = 0; root < world_size_; ++root) {
      const size_t num_bytes = bytes_of_part(c_.splits.input, root);
      reduce(Kind::kReduce, c_.in.data() + offset, num_bytes, root);
      offset += num_bytes;
    }
  }

  // Each rank is the root of the broadcast of its part.
  void broadcast_parts() {
    size_t offset = 0;
    for (int root = 0; root < world_size_; ++root) {
      const size_t num_bytes = bytes_of_part(c_.splits.output, root);
      std::byte* const part = c_.out.data() + offset;
      add({.kind = Kind::kBroadcast,
           .in = root == self_ ? c_.in.data() : part,
           .out = part,
           .count = num_bytes,
           .rank = root});
      offset += num_bytes;
    }
  }

  // Sends consecutive parts of the input, and receives consecutive parts of the output. A part that
  // does not change its place stays there. In a gather every rank sends its whole input to the
  // root, and in a scatter every rank receives its whole output from the root, so the offset does
  // not matter for the other ranks.
  template <typename Sent, typename Received>
  void exchange(const Sent& sent, const Received& received) {
    size_t in_offset = 0;
    size_t out_offset = 0;
    for (int peer = 0; peer < world_size_; ++peer) {
      const size_t num_sent = sent(peer);
      const size_t num_received = received(peer);
      const std::byte* const in = c_.in.data() + in_offset;
      std::byte* const out = c_.out.data() + out_offset;
      in_offset += num_sent;
      out_offset += num_received;
      if (peer == self_ && in == out) continue;
      add({.kind = Kind::kSend, .in = in, .count = num_sent, .rank = peer});
      add({.kind = Kind::kRecv, .out = out, .count = num_received, .rank = peer});
    }
  }

  void add(const NcclCall& call) {
    if (call.count > 0) calls_.push_back(call);
  }

  const Collective& c_;
  const int self_;
  const int world_size_;
  const size_t element_bytes_;
  std::vector<NcclCall> calls_;
};

}  // namespace

std::vector<NcclCall> calls_of(const Collective& collective, Rank self, int world_size) {
  return CallList(collective, self, world_size).take();
}

DataType reduced_type(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
      return DataType::kInt32;
    case DType::kInt64:
      return DataType::kInt64;
    case DType::kBfloat16:
      return DataType::kBfloat16;
    case DType::kFloat32:
      return DataType::kFloat32;
    case DType::kFloat64:
      return DataType::kFloat64;
    case DType::kInt8:
      return DataType::kInt8;
    case DType::kFloat16:
      return DataType::kFloat16;
    case DType::kUint8:
    case DType::kBool:
    case DType::kInt16:
      break;
  }
  return DataType::kUint8;
}

RedOp reduction_of(DType dtype, ReduceOp op) {
  const bool is_bool = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kAvg:
      return RedOp::kAvg;
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return RedOp::kMin;
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return RedOp::kMax;
    case ReduceOp::kProduct:
      return is_bool ? RedOp::kMin : RedOp::kProduct;
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
    case ReduceOp::kBxor:
      break;
  }
  return is_bool ? RedOp::kMax : RedOp::kSum;
}

EnumSet<ReduceOp> nccl_reductions(DType dtype) {
  EnumSet<ReduceOp> all = supported_reductions(dtype);
  if (dtype == DType::kInt16) return {};
  all.erase(ReduceOp::kBxor);
  if (dtype == DType::kBool) return all;
  all.erase(ReduceOp::kBand);
  all.erase(ReduceOp::kBor);
  return all;
}

}  // namespace cadre::nccl
