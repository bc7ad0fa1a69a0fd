#include "cadre/tensor/backends/nccl/nccl_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/backends/nccl/nccl_agreement.h"

namespace cadre::nccl {
namespace {

using Kind = NcclCall::Kind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NcclCallsTest : public ::testing::Test {
 protected:
  // Returns "send 8 of in+4 to 1" and the like.
  std::vector<std::string> texts(Collective collective, int rank, int world_size) {
    EXPECT_TRUE(validate(collective, rank, world_size).ok());
    std::vector<std::string> list;
    for (const NcclCall& call : calls_of(collective, rank, world_size)) {
      static constexpr std::array kNames = {"all_reduce",     "broadcast", "reduce", "all_gather",
                                            "reduce_scatter", "send",      "recv"};
      std::string text = format("{} {}", kNames.at(static_cast<size_t>(call.kind)), call.count);
      if (call.in != nullptr) text += format(" in+{}", call.in - in_.data());
      if (call.out != nullptr) text += format(" out+{}", call.out - out_.data());
      list.push_back(text + format(" {}", call.rank));
    }
    return list;
  }

  ConstBytes in(size_t num_bytes) const { return {in_.data(), num_bytes}; }
  Bytes out(size_t num_bytes) { return {out_.data(), num_bytes}; }

  std::array<std::byte, 64> in_{};
  std::array<std::byte, 64> out_{};
};

TEST_F(NcclCallsTest, ReductionsCountElementsAndOtherKindsCountBytes) {
  EXPECT_THAT(texts(Collective::all_reduce(in(12), out(12), DType::kFloat32, ReduceOp::kSum), 1, 3),
              ElementsAre("all_reduce 3 in+0 out+0 0"));
  EXPECT_THAT(
      texts(Collective::reduce_scatter(in(24), out(8), DType::kFloat32, ReduceOp::kSum), 1, 3),
      ElementsAre("reduce_scatter 2 in+0 out+0 0"));
  EXPECT_THAT(texts(Collective::all_gather(in(8), out(24), DType::kInt16), 1, 3),
              ElementsAre("all_gather 8 in+0 out+0 0"));
}

TEST_F(NcclCallsTest, GatherAndScatterAreMessagesOfTheRoot) {
  EXPECT_THAT(texts(Collective::gather(in(4), out(8), DType::kInt32, 1), 0, 2),
              ElementsAre("send 4 in+0 1"));
  EXPECT_THAT(texts(Collective::gather(in(4), out(8), DType::kInt32, 1), 1, 2),
              ElementsAre("recv 4 out+0 0", "send 4 in+0 1", "recv 4 out+4 1"));
  EXPECT_THAT(texts(Collective::scatter(in(8), out(4), DType::kInt32, 0), 1, 2),
              ElementsAre("recv 4 out+0 0"));
  EXPECT_THAT(texts(Collective::scatter(in(8), out(4), DType::kInt32, 0), 0, 2),
              ElementsAre("send 4 in+0 0", "recv 4 out+0 0", "send 4 in+4 1"));
}

TEST_F(NcclCallsTest, APartThatDoesNotMoveIsNotSent) {
  EXPECT_THAT(
      texts(Collective::gather(ConstBytes(out_).subspan(4, 4), out(8), DType::kInt32, 1), 1, 2),
      ElementsAre("recv 4 out+0 0"));
}

TEST_F(NcclCallsTest, PartsWithoutElementsAreLeftOut) {
  EXPECT_THAT(texts(Collective::all_to_all_v(in(12), out(8), DType::kInt32,
                                             {.input = {0, 1, 2}, .output = {2, 0, 0}}),
                    0, 3),
              ElementsAre("recv 8 out+0 0", "send 4 in+0 1", "send 8 in+4 2"));
  EXPECT_THAT(texts(Collective::all_gather_v(in(8), out(12), DType::kInt32, {1, 0, 2}), 2, 3),
              ElementsAre("broadcast 4 in+" + std::to_string(out_.data() - in_.data()) + " out+0 0",
                          "broadcast 8 in+0 out+4 2"));
  EXPECT_THAT(
      texts(Collective::reduce_scatter_v(in(12), out(0), DType::kInt32, ReduceOp::kMax, {1, 0, 2}),
            1, 3),
      ElementsAre("reduce 1 in+0 out+0 0", "reduce 2 in+4 out+0 2"));
  EXPECT_THAT(texts(Collective::all_reduce(in(0), out(0), DType::kInt32, ReduceOp::kSum), 0, 2),
              IsEmpty());
}

TEST(NcclReductionsTest, LogicalOperationsOnBoolsAreMinimaAndMaxima) {
  EXPECT_EQ(reduction_of(DType::kBool, ReduceOp::kSum), RedOp::kMax);
  EXPECT_EQ(reduction_of(DType::kBool, ReduceOp::kProduct), RedOp::kMin);
  EXPECT_EQ(reduction_of(DType::kBool, ReduceOp::kBand), RedOp::kMin);
  EXPECT_EQ(reduction_of(DType::kInt32, ReduceOp::kProduct), RedOp::kProduct);
  EXPECT_EQ(nccl_reductions(DType::kInt16), EnumSet<ReduceOp>());
  EXPECT_FALSE(nccl_reductions(DType::kInt32).contains(ReduceOp::kBand));
  EXPECT_FALSE(nccl_reductions(DType::kInt64).contains(ReduceOp::kAvg));
}

std::vector<Readiness> two_ranks(const std::string& version, const std::string& device,
                                 const std::string& why_not = "") {
  return {{.version = "2.28.9", .device = {"node0/0000:17:00.0", "boot/node0/0000:17:00.0"}},
          {.why_not = why_not,
           .version = version,
           .device = {.name = device, .key = "boot/" + device}}};
}

TEST(NcclAgreementTest, ChoicesThatDifferAreNamed) {
  std::vector<Readiness> ranks(3, {.choice = "kAuto"});
  EXPECT_EQ(why_choices_differ(ranks), "");
  ranks[2].choice = "kStaged";
  EXPECT_THAT(why_choices_differ(ranks), HasSubstr("rank 2 passes kStaged"));
}

TEST(NcclAgreementTest, NamesTheFirstRankThatCannot) {
  const auto why_not = [](const std::vector<Readiness>& ranks) {
    return why_not_together(ranks, SharedDevices::kRefused);
  };
  EXPECT_EQ(why_not(two_ranks("2.28.9", "node0/0000:18:00.0")), "");
  EXPECT_EQ(why_not(two_ranks("2.28.9", "node0/0000:18:00.0", "no library")), "rank 1: no library");
  EXPECT_THAT(why_not(two_ranks("2.27.3", "node0/0000:18:00.0")),
              HasSubstr("rank 1 has NCCL 2.27.3 and rank 0 has NCCL 2.28.9"));
  EXPECT_THAT(why_not(two_ranks("2.28.9", "node0/0000:17:00.0")),
              HasSubstr("ranks 0 and 1 share the device node0/0000:17:00.0"));
  EXPECT_EQ(why_not_together(two_ranks("2.28.9", "node0/0000:17:00.0"), SharedDevices::kLeftToNccl),
            "");
}

}  // namespace
}  // namespace cadre::nccl
