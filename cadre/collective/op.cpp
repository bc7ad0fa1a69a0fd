#include "cadre/collective/op.h"

#include "cadre/base/format.h"

namespace cadre {
namespace {

constexpr int kDTypeShift = 4;
constexpr int kReduceOpShift = 8;
constexpr int kRootShift = 12;
constexpr int kCountShift = 24;
constexpr uint64_t kNibble = 0xf;
constexpr uint64_t kRootMask = 0xfff;
constexpr uint64_t kCountMask = (uint64_t{1} << 40) - 1;

}  // namespace

uint64_t OpDescriptor::fingerprint() const {
  return (static_cast<uint64_t>(kind) & kNibble) |
         (static_cast<uint64_t>(dtype) & kNibble) << kDTypeShift |
         (static_cast<uint64_t>(reduce_op) & kNibble) << kReduceOpShift |
         (static_cast<uint64_t>(root.value) & kRootMask) << kRootShift |
         (count & kCountMask) << kCountShift;
}

OpDescriptor OpDescriptor::from_fingerprint(uint64_t fingerprint) {
  return {.kind = static_cast<OpKind>(fingerprint & kNibble),
          .dtype = static_cast<DType>(fingerprint >> kDTypeShift & kNibble),
          .reduce_op = static_cast<ReduceOp>(fingerprint >> kReduceOpShift & kNibble),
          .root = static_cast<int>(fingerprint >> kRootShift & kRootMask),
          .count = fingerprint >> kCountShift};
}

std::string OpDescriptor::to_string() const {
  switch (kind) {
    case OpKind::kBarrier:
      return "barrier()";
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
      return format("{}({}, {} x {})", kind, reduce_op, dtype, count);
    case OpKind::kBroadcast:
    case OpKind::kGather:
    case OpKind::kScatter:
      return format("{}({} x {}, root {})", kind, dtype, count, root);
    case OpKind::kReduce:
      return format("{}({}, {} x {}, root {})", kind, reduce_op, dtype, count, root);
    case OpKind::kAllToAllV:
      return format("{}({})", kind, dtype);
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
      break;
  }
  // Also what a peer of another build may have sent: its kind reads "unknown".
  return format("{}({} x {})", kind, dtype, count);
}

}  // namespace cadre
