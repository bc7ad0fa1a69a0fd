// Tests that the state of an optimizer is in the same file as its offloaded parameters, and that
// its steps equal those on parameters in memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/small_disk.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;

constexpr int64_t kNumels[] = {1000, 7, 0, 4096};

std::vector<torch::Tensor> make_leaves(FileMemory* files) {
  std::vector<torch::Tensor> leaves;
  for (const int64_t numel : kNumels) {
    const torch::Tensor values = torch::sin(torch::arange(numel, torch::kFloat));
    torch::Tensor leaf = files != nullptr ? files->zeros(numel, torch::kFloat) : values.clone();
    leaf.copy_(values);
    leaves.push_back(leaf.requires_grad_(true));
  }
  return leaves;
}

void set_gradients(const std::vector<torch::Tensor>& leaves, int step) {
  for (const torch::Tensor& leaf : leaves) {
    leaf.mutable_grad() = torch::cos(torch::arange(leaf.numel(), torch::kFloat) + step);
  }
}

// Returns how many state tensors of these parameters are in the file of `files`.
template <typename O>
size_t num_in(FileMemory& files, O& optimizer, const std::vector<torch::Tensor>& leaves) {
  size_t count = 0;
  for (const torch::Tensor& leaf : leaves) {
    const auto found = optimizer.state().find(leaf.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    optim_state::visit_state_tensors(static_cast<optim_state::StateOf<O>&>(*found->second),
                                     [&](const char*, const torch::Tensor& tensor) {
                                       if (FileMemory::of(tensor).get() == &files) ++count;
                                     });
  }
  return count;
}

template <typename O, typename Plain, typename Options>
void expect_state_in_files(const Options& options, size_t num_states) {
  const testing::TemporaryFolder folder;
  const auto files = FileMemory::open(folder.path());
  const std::vector<torch::Tensor> leaves = make_leaves(files.get());
  const std::vector<torch::Tensor> expected = make_leaves(nullptr);
  O optimizer(leaves, options);
  Plain plain(expected, options);
  for (int step = 0; step < 3; ++step) {
    set_gradients(leaves, step);
    set_gradients(expected, step);
    optimizer.step();
    plain.step();
  }
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::equal(leaves[i], expected[i])) << i;
  const size_t num_with_elements = std::size(kNumels) - 1;
  EXPECT_EQ(num_in(*files, optimizer, leaves), num_states * num_with_elements);
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), leaves.size());

  // State that is loaded from an archive must be in the files, too.
  std::stringstream saved;
  torch::save(optimizer, saved);
  O loaded(leaves, options);
  torch::load(loaded, saved);
  EXPECT_EQ(num_in(*files, loaded, leaves), num_states * num_with_elements);
  set_gradients(leaves, 3);
  set_gradients(expected, 3);
  loaded.step();
  plain.step();
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::equal(leaves[i], expected[i])) << i;
}

TEST(StateInFiles, OfCadresOptimizersLiesBesideTheirParameters) {
  expect_state_in_files<AdamW, AdamW>(torch::optim::AdamWOptions(0.01), 2);
  expect_state_in_files<Adam, Adam>(torch::optim::AdamOptions(0.01).amsgrad(true), 3);
  expect_state_in_files<SGD, SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5), 1);
}

TEST(StateInFiles, OfOtherOptimizersIsMovedThere) {
  namespace optim = torch::optim;
  expect_state_in_files<OffloadedOptimizer<optim::AdamW>, optim::AdamW>(optim::AdamWOptions(0.01),
                                                                        2);
  expect_state_in_files<OffloadedOptimizer<optim::Adam>, optim::Adam>(
      optim::AdamOptions(0.01).amsgrad(true), 3);
  expect_state_in_files<OffloadedOptimizer<optim::SGD>, optim::SGD>(
      optim::SGDOptions(0.1).momentum(0.9), 1);
  expect_state_in_files<OffloadedOptimizer<optim::RMSprop>, optim::RMSprop>(
      optim::RMSpropOptions(0.01).momentum(0.5), 2);
  expect_state_in_files<OffloadedOptimizer<optim::Adagrad>, optim::Adagrad>(
      optim::AdagradOptions(0.01), 1);
}

TEST(StateInFiles, TheStepsOfAParameterListedTwiceAreThoseOfAPlainOptimizer) {
  const testing::TemporaryFolder folder;
  const auto files = FileMemory::open(folder.path());
  const std::vector<torch::Tensor> leaves = make_leaves(files.get());
  const std::vector<torch::Tensor> expected = make_leaves(nullptr);
  const auto groups = [](const std::vector<torch::Tensor>& of) {
    std::vector<torch::optim::OptimizerParamGroup> made;
    made.emplace_back(std::vector<torch::Tensor>{of[0], of[1]});
    made.emplace_back(std::vector<torch::Tensor>{of[3], of[0]},
                      std::make_unique<torch::optim::AdamWOptions>(0.5));
    return made;
  };
  OffloadedOptimizer<torch::optim::AdamW> optimizer(groups(leaves));
  torch::optim::AdamW plain(groups(expected));
  for (int step = 0; step < 3; ++step) {
    set_gradients(leaves, step);
    set_gradients(expected, step);
    const auto closure = [] { return torch::ones({}); };
    EXPECT_EQ(optimizer.step(closure).item<float>(), 1);
    plain.step();
  }
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::equal(leaves[i], expected[i])) << i;
}

// The first step creates the state. The disk has no room for the state of the second group, so the
// step must fail without a change.
TEST(StateInFiles, AFullDiskChangesNothing) {
  const testing::SmallDisk disk(160 << 10);
  if (!disk.is_there()) GTEST_SKIP() << "mounting a tmpfs needs CAP_SYS_ADMIN";
  const auto files = FileMemory::open(disk.folder().path());
  const torch::Tensor small = files->zeros(1000, torch::kFloat).requires_grad_(true);
  const torch::Tensor large = files->zeros(20'000, torch::kFloat).requires_grad_(true);
  AdamW optimizer(
      {torch::optim::OptimizerParamGroup({small}), torch::optim::OptimizerParamGroup({large})},
      torch::optim::AdamWOptions(0.1));
  set_gradients({small, large}, 0);
  EXPECT_THAT(failure_of([&] { optimizer.step(); }),
              HasSubstr("kUnavailable: reserve 81920 bytes in folder"));
  EXPECT_EQ(small.count_nonzero().item<int64_t>(), 0);
  EXPECT_TRUE(optimizer.state().empty());
}

}  // namespace
}  // namespace cadre
