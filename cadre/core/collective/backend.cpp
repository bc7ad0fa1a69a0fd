#include "cadre/core/collective/backend.h"

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"

namespace cadre {
namespace {

constexpr OpKind kNotCollectives[] = {OpKind::kSend, OpKind::kRecv, OpKind::kAllocate,
                                      OpKind::kWaitSignal};

template <typename Enum>
std::string list(const EnumSet<Enum>& set, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (set.contains(value)) text += format("{}{}", text.empty() ? "" : ", ", to_string(value));
  }
  return text.empty() ? "none" : text;
}

std::string refusal(const Capabilities& can, const Collective& c) {
  const std::string_view backend = can.name;
  if (!can.kinds.contains(c.kind)) {
    return format(
        "{}: backend \"{}\" does not have this operation (it has: {}); use one of these, or "
        "connect the group with another backend",
        c.kind, backend, list(can.kinds, kNumOpKinds));
  }
  if (!can.devices.contains(c.device.type)) {
    return format(
        "{}: the buffers are on {}, backend \"{}\" works on {}; move them there, or "
        "connect the group with another backend",
        c.kind, to_string(c.device), backend, list(can.devices, kNumDeviceTypes));
  }
  if (!can.dtypes.contains(c.dtype)) {
    return format(
        "{}: backend \"{}\" does not move {} (it moves: {}); convert the elements, or connect "
        "the group with another backend",
        c.kind, backend, c.dtype, list(can.dtypes, kNumDTypes));
  }
  return format(
      "{}: backend \"{}\" does not compute {} of {} (of this dtype it computes: {}); use one of "
      "these, or connect the group with another backend",
      c.kind, backend, c.reduction.op(), c.dtype,
      list(can.reductions[static_cast<size_t>(c.dtype)], kNumReduceOps));
}

}  // namespace

Capabilities full_capabilities(std::string_view name) {
  Capabilities can{.name = name,
                   .kinds = EnumSet<OpKind>::first(kNumOpKinds),
                   .dtypes = EnumSet<DType>::first(kNumDTypes),
                   .devices = {DeviceType::kCpu}};
  for (const OpKind kind : kNotCollectives) can.kinds.erase(kind);
  for (size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
    can.reductions[dtype] = supported_reductions(static_cast<DType>(dtype));
    can.reductions[dtype].erase(ReduceOp::kPremulSum);
  }
  return can;
}

Error unsupported(const Capabilities& can, const Collective& c) {
  return Error(ErrorCode::kInvalidArgument, refusal(can, c));
}

}  // namespace cadre
