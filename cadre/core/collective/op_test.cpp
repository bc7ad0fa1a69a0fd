#include "cadre/core/collective/op.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace cadre {
namespace {

const std::vector<int64_t> kSizes[] = {{7}, {}, {7, 1}};

void set_root_or_number(OpDescriptor& op, int value) {
  if (op.has_root()) {
    op.root = value;
  } else {
    op.num_coalesced = static_cast<uint16_t>(value);
  }
}

std::vector<OpDescriptor> samples() {
  std::vector<OpDescriptor> all;
  for (int kind = 0; kind < kNumOpKinds; ++kind) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (int reduce_op = 0; reduce_op < kNumReduceOps; ++reduce_op) {
        for (const auto& [root_or_number, on_device] :
             {std::pair(0, false), std::pair(0, true), std::pair(1, false), std::pair(63, true),
              std::pair(4095, false), std::pair(4096, false), std::pair(65535, true)}) {
          for (uint64_t count :
               {uint64_t{0}, uint64_t{1}, uint64_t{1000003}, (uint64_t{1} << 35) - 1}) {
            for (const std::vector<int64_t>& sizes : kSizes) {
              all.push_back({.kind = static_cast<OpKind>(kind),
                             .dtype = static_cast<DType>(dtype),
                             .reduce_op = static_cast<ReduceOp>(reduce_op),
                             .count = count,
                             .shape = PackedShape(sizes),
                             .on_device = on_device});
              set_root_or_number(all.back(), root_or_number);
            }
          }
        }
      }
    }
  }
  return all;
}

TEST(OpDescriptorTest, FingerprintLosesNothing) {
  for (const OpDescriptor& op : samples()) {
    const OpDescriptor back = OpDescriptor::from_fingerprint(op.fingerprint());
    EXPECT_EQ(back.kind, op.kind);
    EXPECT_EQ(back.dtype, op.dtype);
    EXPECT_EQ(back.reduce_op, op.reduce_op);
    EXPECT_EQ(back.root.value, op.root.value);
    EXPECT_EQ(back.num_coalesced, op.num_coalesced);
    EXPECT_EQ(back.count, op.count);
    EXPECT_EQ(back.shape, op.shape);
    EXPECT_EQ(back.on_device, op.on_device);
  }
}

TEST(OpDescriptorTest, DifferentOperationsHaveDifferentFingerprints) {
  std::set<std::pair<uint64_t, uint64_t>> seen;
  for (const OpDescriptor& op : samples()) {
    const Fingerprint fingerprint = op.fingerprint();
    EXPECT_TRUE(seen.emplace(fingerprint.call, fingerprint.shape).second);
  }
}

TEST(OpDescriptorTest, BitsLieWhereTheHeaderSays) {
  OpDescriptor op{.kind = OpKind::kReduce,
                  .dtype = DType::kFloat32,
                  .reduce_op = ReduceOp::kAvg,
                  .root = 5,
                  .count = 7};
  EXPECT_EQ(op.fingerprint().call, 0x8u | 0x4u << 4 | 0x1u << 8 | 0x5u << 12 | 0x7u << 28);
  EXPECT_EQ(op.fingerprint().shape, 0u);
  op.kind = OpKind::kAllReduce;
  op.num_coalesced = 3;
  EXPECT_EQ(op.fingerprint().call, 0x1u | 0x4u << 4 | 0x1u << 8 | 0x3u << 12 | 0x7u << 28);
  op.on_device = true;
  EXPECT_EQ(op.fingerprint().call,
            uint64_t{1} << 63 | 0x1u | 0x4u << 4 | 0x1u << 8 | 0x3u << 12 | 0x7u << 28);
}

TEST(OpDescriptorTest, RootsOfManyRanksDiffer) {
  const OpDescriptor first{.kind = OpKind::kBroadcast, .root = 0, .count = 9};
  const OpDescriptor other{.kind = OpKind::kBroadcast, .root = 4096, .count = 9};
  EXPECT_NE(first.fingerprint(), other.fingerprint());
  EXPECT_EQ(OpDescriptor::from_fingerprint(other.fingerprint()).root, 4096);
}

TEST(OpDescriptorTest, LongCountsAreKeptWhole) {
  for (const int bits : {35, 36, 40, 62}) {
    const uint64_t count = (uint64_t{1} << bits) + 3;
    const OpDescriptor op{.kind = OpKind::kAllGather, .count = count};
    const OpDescriptor back = OpDescriptor::from_fingerprint(op.fingerprint());
    EXPECT_EQ(back.count, count);
    EXPECT_EQ(back.shape, PackedShape());
    EXPECT_EQ(back.kind, OpKind::kAllGather);
    EXPECT_EQ(back.to_string(), "all_gather(uint8 x " + std::to_string(count) + ")");
  }
}

TEST(OpDescriptorTest, ReadsAsItsCall) {
  const auto text = [](OpKind kind, uint64_t count) {
    return OpDescriptor{.kind = kind, .dtype = DType::kFloat32, .root = 2, .count = count}
        .to_string();
  };
  EXPECT_EQ(text(OpKind::kAllReduce, 1024), "all_reduce(sum, float32 x 1024)");
  EXPECT_EQ(text(OpKind::kReduceScatter, 9), "reduce_scatter(sum, float32 x 9)");
  EXPECT_EQ(text(OpKind::kBroadcast, 3), "broadcast(float32 x 3, root 2)");
  EXPECT_EQ(text(OpKind::kReduce, 5), "reduce(sum, float32 x 5, root 2)");
  EXPECT_EQ(text(OpKind::kGather, 5), "gather(float32 x 5, root 2)");
  EXPECT_EQ(text(OpKind::kScatter, 5), "scatter(float32 x 5, root 2)");
  EXPECT_EQ(text(OpKind::kAllToAll, 6), "all_to_all(float32 x 6)");
  EXPECT_EQ(text(OpKind::kAllToAllV, 0), "all_to_all_v(float32)");
  EXPECT_EQ(text(OpKind::kAllGather, 4), "all_gather(float32 x 4)");
  EXPECT_EQ(text(OpKind::kSend, 4), "send(float32 x 4)");
  EXPECT_EQ(text(OpKind::kBarrier, 0), "barrier()");
  OpDescriptor together{.kind = OpKind::kAllGather, .count = 4, .num_coalesced = 2};
  EXPECT_EQ(together.to_string(), "all_gather(uint8 x 4, one of 2 in a call)");
  together.kind = OpKind::kAllToAllV;
  EXPECT_EQ(together.to_string(), "all_to_all_v(uint8, one of 2 in a call)");
  together.kind = OpKind::kBarrier;
  EXPECT_EQ(together.to_string(), "barrier(one of 2 in a call)");
  const std::vector<int64_t> sizes = {2, 3};
  EXPECT_EQ(
      (OpDescriptor{.kind = OpKind::kReduce, .count = 6, .shape = PackedShape(sizes)}).to_string(),
      "reduce(sum, uint8 x [2, 3], root 0)");
}

// A peer may send codes of dtypes and reductions that do not exist. All codes of kinds are in use.
TEST(OpDescriptorTest, UnknownCodesFromAPeerAreNamedSo) {
  EXPECT_EQ(OpDescriptor::from_fingerprint({.call = 0xff1}).to_string(),
            "all_reduce(unknown, unknown x 0)");
}

}  // namespace
}  // namespace cadre
