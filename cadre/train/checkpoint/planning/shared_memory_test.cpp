// Tests loads into tensors that share memory. If two tensors would write different values to one
// element, the load throws on all ranks and changes no tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

SnapshotParts parts_of_tensors(const Tensor& first, const Tensor& second) {
  SnapshotParts parts;
  parts.parameters = {whole_tensor("first", first), whole_tensor("second", second)};
  return parts;
}

class SharedStorage : public ::testing::Test {
 protected:
  // Saves a snapshot of 'first' and 'second' with these values.
  void save(const Tensor& first, const Tensor& second) {
    SnapshotFolder folder(run_.path());
    save_sharded(folder, 1, parts_of_tensors(first, second));
  }
  std::string load_failure(const SnapshotParts& parts) {
    return testing::failure_of(
        [&] { load_sharded(SnapshotFolder(run_.path()).path_of(1), parts); });
  }
  testing::TemporaryFolder run_;
};

TEST_F(SharedStorage, TwoTensorsThatOverlapInPartAreRefusedByBothNames) {
  save(torch::full({4}, 1.0F), torch::full({4}, 2.0F));
  const Tensor memory = torch::zeros({6});
  const auto overlapping = parts_of_tensors(memory.narrow(0, 0, 4), memory.narrow(0, 2, 4));
  EXPECT_THAT(load_failure(overlapping),
              AllOf(HasSubstr("'first' and 'second' share memory"), HasSubstr("kInvalidArgument")));
  EXPECT_TRUE(memory.eq(0).all().item<bool>()) << memory;
  const auto apart = parts_of_tensors(torch::zeros({4}), torch::zeros({4}));
  EXPECT_EQ(load_failure(apart), "");
}

// The columns of one matrix interleave in memory, but share no element.
TEST_F(SharedStorage, InterleavedTensorsWithoutACommonElementAreLoaded) {
  save(torch::full({3}, 1.0F), torch::full({3}, 2.0F));
  const Tensor matrix = torch::zeros({3, 2});
  EXPECT_EQ(load_failure(parts_of_tensors(matrix.select(1, 0), matrix.select(1, 1))), "");
  EXPECT_TRUE(matrix.equal(torch::tensor({{1.0F, 2.0F}, {1.0F, 2.0F}, {1.0F, 2.0F}})));
  const Tensor square = torch::zeros({3, 3});
  EXPECT_THAT(load_failure(parts_of_tensors(square.select(1, 0), square.select(0, 2))),
              HasSubstr("share memory"));
}

// One tensor is registered under two names. The load succeeds if the snapshot has equal values for
// both names, and throws otherwise.
TEST_F(SharedStorage, OneTensorUnderTwoNamesIsLoadedIfBothHaveItsValues) {
  save(torch::full({4}, 3.0F), torch::full({4}, 3.0F));
  const Tensor memory = torch::zeros({4});
  EXPECT_EQ(load_failure(parts_of_tensors(memory, memory.view({4}))), "");
  EXPECT_TRUE(memory.eq(3).all().item<bool>());
  testing::TemporaryFolder other;
  SnapshotFolder folder(other.path());
  save_sharded(folder, 1, parts_of_tensors(torch::full({4}, 1.0F), torch::full({4}, 2.0F)));
  memory.zero_();
  EXPECT_THAT(testing::failure_of([&] {
                load_sharded(folder.path_of(1), parts_of_tensors(memory, memory.view({4})));
              }),
              HasSubstr("'first' and 'second' share memory"));
  EXPECT_TRUE(memory.eq(0).all().item<bool>()) << "the load changed the tensor before it threw";
}

// Buffers are checked in the same way as parameters.
TEST_F(SharedStorage, AParameterAndABufferThatOverlapAreRefused) {
  const auto make = [](const Tensor& parameter, const Tensor& buffer) {
    SnapshotParts parts;
    parts.parameters = {whole_tensor("weight", parameter)};
    parts.buffers = {whole_tensor("mask", buffer)};
    return parts;
  };
  SnapshotFolder folder(run_.path());
  save_sharded(folder, 1, make(torch::ones({4}), torch::full({2}, 5.0F)));
  const Tensor memory = torch::zeros({4});
  EXPECT_THAT(load_failure(make(memory, memory.narrow(0, 1, 2))),
              HasSubstr("'weight' and 'mask' share memory"));
}

// The tensors share memory on rank 1 only. The load throws on both ranks and changes no tensor.
TEST_F(SharedStorage, OneRankWithSharedMemoryIsRefusedOnAll) {
  save(torch::full({4}, 1.0F), torch::full({4}, 2.0F));
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const Tensor memory = torch::zeros({6});
    const Tensor other = torch::zeros({4});
    const auto parts = parts_of_tensors(memory.narrow(0, 0, 4),
                                        group.rank() == 1 ? memory.narrow(0, 2, 4) : other);
    output = testing::failure_of(
        [&] { load_sharded(SnapshotFolder(run_.path()).path_of(1), parts, group); });
    testing::require(memory.eq(0).all().item<bool>() && other.eq(0).all().item<bool>(),
                     "nothing has changed");
    group.barrier();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              AllOf(HasSubstr("rank 1: "), HasSubstr("'first' and 'second' share memory")));
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
}

// Each of the tensors is saved as a whole, so the snapshot contains the values of both.
TEST_F(SharedStorage, SavingTwoTensorsThatShareMemoryKeepsBothValues) {
  const Tensor memory = torch::arange(6, torch::kFloat);
  save(memory.narrow(0, 0, 4), memory.narrow(0, 2, 4));
  const Tensor first = torch::zeros({4});
  const Tensor second = torch::zeros({4});
  EXPECT_EQ(load_failure(parts_of_tensors(first, second)), "");
  EXPECT_TRUE(first.equal(memory.narrow(0, 0, 4)));
  EXPECT_TRUE(second.equal(memory.narrow(0, 2, 4)));
}

}  // namespace
}  // namespace cadre
