// Tests which tensors are found to share memory, so that they cannot be sharded.
#include "cadre/parallel/shard/shardable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::shard {
namespace {

using cadre::testing::failure_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::Tensor;

std::string refusal(const std::vector<NamedTensor>& moved,
                    const std::vector<NamedTensor>& kept = {}) {
  return failure_of([&] { check_apart("a test", moved, kept); });
}

TEST(CheckApart, FindsTensorsThatShareAnElement) {
  const Tensor base = torch::zeros({6, 4});
  const Tensor alone = torch::zeros({3});
  const auto shared = AllOf(HasSubstr("a test: "), HasSubstr("\"a\""), HasSubstr("\"b\""),
                            HasSubstr("share memory"));
  for (const Tensor& other :
       {base.detach(), base.view({24}), base.t(), base.narrow(0, 2, 1), base.select(1, 3),
        base.view({24}).narrow(0, 23, 1), base.view(torch::kInt), base.as_strided({1}, {7}, 5)}) {
    EXPECT_THAT(refusal({{"a", base}, {"alone", alone}, {"b", other}}), shared);
    EXPECT_THAT(refusal({{"b", other}}, {{"alone", alone}, {"a", base}}), shared);
    EXPECT_EQ(refusal({{"alone", alone}}, {{"b", other}, {"a", base}}), "") << "none is moved";
  }
}

TEST(CheckApart, TellsPartsOfOneStorageFromSharedElements) {
  const Tensor base = torch::zeros({6, 4});
  EXPECT_EQ(refusal({{"a", base.narrow(0, 0, 3)}, {"b", base.narrow(0, 3, 3)}}), "");
  EXPECT_EQ(refusal({{"a", base.narrow(1, 0, 2)}, {"b", base.narrow(1, 2, 2)}}), "");
  EXPECT_THAT(refusal({{"a", base.narrow(1, 0, 2)}, {"b", base.narrow(1, 1, 2)}}),
              HasSubstr("share memory"));
  EXPECT_EQ(refusal({{"a", base.select(1, 0)}, {"b", base.select(1, 1)}}), "");
  EXPECT_EQ(refusal({{"a", base.narrow(0, 0, 0)}, {"b", base}}), "") << "no elements";
  EXPECT_EQ(refusal({{"a", base}}, {{"a", base}, {"none", Tensor()}}), "") << "itself";
}

std::vector<std::string> warnings(const std::vector<NamedTensor>& moved,
                                  const std::vector<NamedTensor>& kept = {}) {
  cadre::testing::LogLines log;
  warn_of_other_holders(log, "test", moved, kept);
  return log.get();
}

TEST(CheckShardable, AResultOfAnOperationIsRefusedWithTheRemedy) {
  const Tensor result = torch::ones({2}).requires_grad_() * 2;
  const ShardedDtypes rules{.shard = at::kFloat, .compute = at::kFloat};
  EXPECT_THAT(failure_of([&] {
                check_shardable("a test", {{"w", result}}, rules);
              }),
              AllOf(HasSubstr("\"w\" is the result of an operation and no leaf"),
                    HasSubstr("pass the parameters of a module")));
}

TEST(OtherHolders, AreTensorsInTheMemoryThatAreInNoList) {
  const Tensor alone = torch::zeros({3});
  Tensor base = torch::zeros({6, 4});
  const Tensor same = base;  // another handle of the same tensor
  EXPECT_THAT(warnings({{"a", base}, {"b", alone}}), IsEmpty());
  const Tensor top = base.narrow(0, 0, 3);
  const Tensor rest = base.narrow(0, 3, 3);
  EXPECT_THAT(warnings({{"top", top}, {"rest", rest}}, {{"base", base}}), IsEmpty());
  EXPECT_THAT(warnings({{"top", top}, {"b", alone}, {"rest", rest}}),
              ElementsAre(AllOf(
                  HasSubstr("test tensors that are not registered share memory with parameters"),
                  HasSubstr("first=\"top\" parameters=2"))));
  EXPECT_THAT(warnings({{"b", alone}}, {{"top", top}}), IsEmpty()) << "it stays where it is";
}

TEST(CheckApart, ComparesTensorsOnTheMetaDeviceByTheirStorages) {
  const auto meta = torch::TensorOptions(torch::kMeta);
  const Tensor base = torch::empty({6}, meta);
  EXPECT_EQ(refusal({{"a", base}, {"b", torch::empty({6}, meta)}, {"c", torch::zeros({6})}}), "");
  EXPECT_EQ(refusal({{"a", base.narrow(0, 0, 3)}, {"b", base.narrow(0, 3, 3)}}), "");
  EXPECT_THAT(refusal({{"a", base.narrow(0, 0, 4)}, {"b", base.narrow(0, 3, 3)}}),
              HasSubstr("share memory"));
}

}  // namespace
}  // namespace cadre::shard
