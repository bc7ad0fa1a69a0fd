#include "cadre/train/checkpoint/snapshot_parts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace cadre::snapshot_parts_test {
namespace {

using ::testing::ElementsAre;

SnapshotTensor entry(const std::string& name, bool is_copy) {
  SnapshotTensor tensor = whole_tensor(name, at::empty({2}));
  tensor.is_copy = is_copy;
  return tensor;
}

TEST(SnapshotParts, ASliceIsRelativeToItsBox) {
  // The box has rows 2 to 4 and columns 1 to 4 of a tensor; the part is row 3, columns 2 and 3.
  const at::Tensor values = at::arange(12).view({3, 4});
  const at::Tensor slice = slice_of(values, {{2, 1}, {3, 4}}, {{3, 2}, {1, 2}});
  EXPECT_TRUE(slice.equal(at::tensor({5, 6}, at::kLong).view({1, 2})));
  EXPECT_EQ(slice.storage().data(), values.storage().data()) << "the slice must be a view";
}

TEST(SnapshotParts, AWholeTensorIsOneBox) {
  const SnapshotTensor whole = whole_tensor("weight", at::empty({2, 3}));
  EXPECT_THAT(whole.boxes, ElementsAre(Box{{0, 0}, {2, 3}}));
  EXPECT_EQ(whole.sizes, (std::vector<int64_t>{2, 3}));
}

TEST(SnapshotParts, EntriesOfOneNameAreNumbered) {
  const std::vector<SnapshotTensor> parameters = {entry("a", false), entry("b", false),
                                                  entry("a", true)};
  const SnapshotEntries entries = entries_of(parameters);
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries.at({"a", 1}), &parameters[2]);
  EXPECT_EQ(entries.at({"b", 0}), &parameters[1]);
}

TEST(SnapshotParts, WithoutCopiesEachEntryIsTheFirst) {
  SnapshotParts parts;
  parts.parameters = {entry("a", true), entry("b", false), entry("a", false)};
  parts.optimizer = {{.parameter = "a", .entry = 0},
                     {.parameter = "b", .entry = 0},
                     {.parameter = "a", .entry = 1}};
  const SnapshotParts kept = without_copies(parts);
  ASSERT_EQ(kept.parameters.size(), 2U);
  EXPECT_EQ(kept.parameters[0].name, "b");
  EXPECT_TRUE(kept.parameters[1].values.is_same(parts.parameters[2].values));
  ASSERT_EQ(kept.optimizer.size(), 2U);
  EXPECT_EQ(kept.optimizer[0].parameter, "b");
  EXPECT_EQ(kept.optimizer[1].parameter, "a");
  EXPECT_EQ(kept.optimizer[1].entry, 0U);
}

TEST(SnapshotParts, ATiedParameterIsThereOnce) {
  torch::nn::Module module;
  const at::Tensor weight = at::empty({3});
  module.register_parameter("first", weight);
  module.register_parameter("second", weight);
  module.register_buffer("mean", at::empty({1}));
  const SnapshotParts parts = parts_of(module);
  ASSERT_EQ(parts.parameters.size(), 1U);
  EXPECT_EQ(parts.parameters[0].name, "first");
  ASSERT_EQ(parts.buffers.size(), 1U);
  EXPECT_EQ(parts.buffers[0].name, "mean");
}

}  // namespace
}  // namespace cadre::snapshot_parts_test
