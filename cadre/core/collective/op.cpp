#include "cadre/core/collective/op.h"

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr int kDTypeShift = 4;
constexpr int kReduceOpShift = 8;
constexpr int kRootShift = 12;
constexpr int kCountShift = 28;
constexpr int kCountBits = 35;
constexpr int kDeviceShift = kCountShift + kCountBits;
constexpr uint64_t kFieldMask = 0xf;
constexpr uint64_t kRootMask = 0xffff;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
constexpr int kShapeTagBits = 4;
static_assert(kNumOpKinds - 1 <= static_cast<int>(kFieldMask), "a kind has a field of 4 bits");
static_assert(kNumDTypes - 1 <= static_cast<int>(kFieldMask), "a dtype has a field of 4 bits");
static_assert(kNumReduceOps - 1 <= static_cast<int>(kFieldMask), "a ReduceOp has 4 bits");

// The packed form of one dimension has no sizes, so its bits can hold the high bits of a large
// count.
bool is_one_dimension(uint64_t shape) {
  return (shape & kFieldMask) == 0;
}

}  // namespace

bool OpDescriptor::has_root() const {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter || kind == OpKind::kSend || kind == OpKind::kRecv;
}

// The root and the number of coalesced collectives share a field of the fingerprint: no kind has
// both.
Fingerprint OpDescriptor::fingerprint() const {
  const uint64_t root_field = has_root() ? static_cast<uint64_t>(root.value) : num_coalesced;
  const uint64_t call = (static_cast<uint64_t>(kind) & kFieldMask) |
                        (static_cast<uint64_t>(dtype) & kFieldMask) << kDTypeShift |
                        (static_cast<uint64_t>(reduce_op) & kFieldMask) << kReduceOpShift |
                        (root_field & kRootMask) << kRootShift |
                        (count & kCountMask) << kCountShift |
                        static_cast<uint64_t>(on_device) << kDeviceShift;
  const uint64_t rest_of_count = is_one_dimension(shape.bits()) ? count >> kCountBits : 0;
  return {.call = call, .shape = shape.bits() | rest_of_count << kShapeTagBits};
}

OpDescriptor OpDescriptor::from_fingerprint(const Fingerprint& fingerprint) {
  const uint64_t call = fingerprint.call;
  const bool is_line = is_one_dimension(fingerprint.shape);
  const uint64_t rest_of_count = is_line ? fingerprint.shape >> kShapeTagBits : 0;
  const auto root_field = static_cast<uint16_t>(call >> kRootShift & kRootMask);
  OpDescriptor descriptor{
      .kind = static_cast<OpKind>(call & kFieldMask),
      .dtype = static_cast<DType>(call >> kDTypeShift & kFieldMask),
      .reduce_op = static_cast<ReduceOp>(call >> kReduceOpShift & kFieldMask),
      .count = (call >> kCountShift & kCountMask) | rest_of_count << kCountBits,
      .shape = is_line ? PackedShape() : PackedShape::from_bits(fingerprint.shape),
      .on_device = (call >> kDeviceShift & 1) != 0};
  if (descriptor.has_root()) {
    descriptor.root = root_field;
  } else {
    descriptor.num_coalesced = root_field;
  }
  return descriptor;
}

std::string OpDescriptor::to_string() const {
  std::string together = num_coalesced == 0 ? "" : format("one of {} in a call", num_coalesced);
  if (on_device) together += together.empty() ? "on the device" : ", on the device";
  const std::string separator = together.empty() ? "" : ", ";
  const std::string elements =
      format("{} {}{}{}", dtype, shape.to_string(count), separator, together);
  switch (kind) {
    case OpKind::kBarrier:
      return format("barrier({})", together);
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV:
      return format("{}({}, {})", kind, reduce_op, elements);
    case OpKind::kBroadcast:
    case OpKind::kGather:
    case OpKind::kScatter:
      return format("{}({}, root {})", kind, elements, root);
    case OpKind::kReduce:
      return format("{}({}, {}, root {})", kind, reduce_op, elements, root);
    case OpKind::kAllToAllV:
      return format("{}({}{}{})", kind, dtype, separator, together);
    case OpKind::kWaitSignal:
      return format("{}(slot {})", kind, count);
    case OpKind::kAllGather:
    case OpKind::kAllGatherV:
    case OpKind::kAllToAll:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllocate:
      break;
  }
  return format("{}({})", kind, elements);
}

std::string describe_operation(uint64_t number, const Fingerprint& fingerprint) {
  return format("{} #{}", OpDescriptor::from_fingerprint(fingerprint).kind, number);
}

}  // namespace cadre
