// Tests the capabilities of an engine, and the error for a collective that it does not support.
#include "cadre/core/collective/backend.h"

#include <gtest/gtest.h>

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"

namespace cadre {
namespace {

Collective sum_of(DType dtype, Device device = {}) {
  Collective c = Collective::all_reduce({}, {}, dtype, ReduceOp::kSum);
  c.device = device;
  return c;
}

std::string refusal_of(const Capabilities& can, const Collective& c) {
  const Status status = check_supported(can, c);
  if (status.ok()) return "";
  EXPECT_EQ(status.error().code(), ErrorCode::kInvalidArgument);
  return status.error().message();
}

TEST(CapabilitiesTest, AFullEngineReducesWhatTheTableSupportsOnTheCpu) {
  const Capabilities can = full_capabilities("host");
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      const auto type = static_cast<DType>(dtype);
      const auto reduction = static_cast<ReduceOp>(op);
      // A kPremulSum runs as a SUM of inputs that the group has multiplied. So the rule that
      // PREMUL_SUM needs a floating-point type does not apply here.
      const bool expected = reduction == ReduceOp::kPremulSum || is_supported(type, reduction);
      EXPECT_EQ(can.supports(OpKind::kAllReduce, type, reduction, DeviceType::kCpu), expected)
          << format("{} of {}", reduction, type);
      EXPECT_FALSE(can.supports(OpKind::kAllReduce, type, reduction, DeviceType::kCuda));
      EXPECT_TRUE(can.supports(OpKind::kAllGather, type, reduction, DeviceType::kCpu));
    }
  }
  EXPECT_FALSE(can.supports(OpKind::kSend, DType::kUint8, ReduceOp::kSum, DeviceType::kCpu));
}

TEST(CapabilitiesTest, InputsAreMultipliedBeforeTheEngineOnlyOnTheCpuAndNotBehindAStream) {
  const auto supports = [](const Capabilities& can, DeviceType device) {
    return can.supports(OpKind::kReduce, DType::kFloat32, ReduceOp::kPremulSum, device);
  };
  Capabilities can = full_capabilities("plug-in");
  can.devices.insert(DeviceType::kCuda);
  EXPECT_TRUE(can.needs_multiplied_inputs(DType::kFloat32, ReduceOp::kPremulSum));
  EXPECT_TRUE(supports(can, DeviceType::kCpu));
  EXPECT_FALSE(supports(can, DeviceType::kCuda));
  can.is_stream_ordered = true;
  EXPECT_FALSE(supports(can, DeviceType::kCpu));
  can.reductions[static_cast<size_t>(DType::kFloat32)].insert(ReduceOp::kPremulSum);
  EXPECT_FALSE(can.needs_multiplied_inputs(DType::kFloat32, ReduceOp::kPremulSum));
  EXPECT_TRUE(supports(can, DeviceType::kCpu));
  EXPECT_TRUE(supports(can, DeviceType::kCuda));
}

TEST(CapabilitiesTest, ARefusalSaysWhatIsThereInsteadAndWhatToDo) {
  Capabilities can{.name = "few",
                   .kinds = {OpKind::kBroadcast, OpKind::kAllReduce, OpKind::kBarrier},
                   .dtypes = {DType::kFloat32, DType::kInt32},
                   .devices = {DeviceType::kCpu}};
  can.reductions[static_cast<size_t>(DType::kFloat32)] = {ReduceOp::kSum, ReduceOp::kMax};
  EXPECT_EQ(refusal_of(can, sum_of(DType::kFloat32)), "");
  EXPECT_EQ(refusal_of(can, Collective::barrier()), "");
  EXPECT_EQ(refusal_of(can, Collective::all_gather({}, {}, DType::kFloat32)),
            "all_gather: backend \"few\" does not have this operation (it has: broadcast, "
            "all_reduce, barrier); use "
            "one of these, or connect the group with another backend");
  EXPECT_EQ(refusal_of(can, sum_of(DType::kFloat32, {DeviceType::kCuda, 1})),
            "all_reduce: the buffers are on cuda:1, backend \"few\" works on cpu; move them there, "
            "or connect the group with another backend");
  EXPECT_EQ(
      refusal_of(can, sum_of(DType::kBfloat16)),
      "all_reduce: backend \"few\" does not move bfloat16 (it moves: int32, float32); convert the "
      "elements, or connect the group with another backend");
  // An engine must support the dtype and the device of a collective that only moves data. The
  // reduction is ignored.
  Collective moved = Collective::broadcast({}, DType::kInt32, 0);
  EXPECT_EQ(refusal_of(can, moved), "");
  moved.device = {DeviceType::kCuda, 0};
  EXPECT_EQ(
      refusal_of(can, moved),
      "broadcast: the buffers are on cuda:0, backend \"few\" works on cpu; move them there, or "
      "connect the group with another backend");
  EXPECT_EQ(
      refusal_of(can, Collective::broadcast({}, DType::kBfloat16, 0)),
      "broadcast: backend \"few\" does not move bfloat16 (it moves: int32, float32); convert the "
      "elements, or connect the group with another backend");
  EXPECT_EQ(refusal_of(can, sum_of(DType::kInt32)),
            "all_reduce: backend \"few\" does not compute sum of int32 (of this dtype it computes: "
            "none); use one of "
            "these, or connect the group with another backend");
}

}  // namespace
}  // namespace cadre
