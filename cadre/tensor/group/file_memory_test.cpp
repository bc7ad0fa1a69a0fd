#include "cadre/tensor/group/file_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/beside.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/small_disk.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;

TEST(FileMemory, HoldsTensorsThatKeepIt) {
  const testing::TemporaryFolder folder;
  auto files = FileMemory::open(folder.path());
  torch::Tensor tensor = files->zeros(3000, torch::kDouble);
  EXPECT_TRUE(torch::equal(tensor, torch::zeros({3000}, torch::kDouble)));
  EXPECT_EQ(files->used_bytes(), FileMemory::in_pages(3000 * 8));
  const torch::Tensor view = tensor.narrow(0, 10, 5).variable_data();
  EXPECT_EQ(FileMemory::of(view), files);
  tensor.fill_(2);
  tensor.reset();
  EXPECT_EQ(files->used_bytes(), FileMemory::in_pages(3000 * 8)) << "the view keeps it";
  const std::weak_ptr<FileMemory> gone = files;
  files.reset();
  EXPECT_EQ(view.sum().item<double>(), 10);
  EXPECT_FALSE(gone.expired());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(FileMemory, GivesBackWhatTensorsHeld) {
  const testing::TemporaryFolder folder;
  const auto files = FileMemory::open(folder.path());
  EXPECT_EQ(files->zeros(0, torch::kFloat).numel(), 0);
  files->zeros(10'000, torch::kFloat).fill_(1);
  EXPECT_EQ(files->used_bytes(), 0);
  EXPECT_EQ(files->zeros(10'000, torch::kFloat).count_nonzero().item<int64_t>(), 0);
}

TEST(FileMemory, PutsBesideATensorWhatBelongsToIt) {
  const testing::TemporaryFolder folder;
  const auto files = FileMemory::open(folder.path());
  const torch::Tensor in_file =
      files->zeros(12, torch::kFloat).as_strided({3, 4}, {1, 3}).requires_grad_(true);
  const torch::Tensor state = zeros_beside(in_file);
  EXPECT_EQ(FileMemory::of(state), files);
  EXPECT_EQ(state.strides(), in_file.strides());
  EXPECT_FALSE(state.requires_grad());
  EXPECT_EQ(FileMemory::of(zeros_beside(torch::ones({2}))), nullptr);

  const torch::Tensor loaded = torch::arange(12, torch::kDouble).view({3, 4});
  const torch::Tensor moved = moved_beside(in_file, loaded);
  EXPECT_EQ(FileMemory::of(moved), files);
  EXPECT_TRUE(torch::equal(moved, loaded));
  EXPECT_TRUE(moved_beside(in_file, moved).is_same(moved)) << "it is there already";
  EXPECT_TRUE(moved_beside(loaded, state).is_same(state)) << "a tensor in memory asks for nothing";
  EXPECT_FALSE(moved_beside(in_file, {}).defined());
  const torch::Tensor repeated = torch::ones({1}).expand({4});
  EXPECT_TRUE(torch::equal(moved_beside(in_file, repeated), torch::ones({4})));
}

TEST(FileMemory, ReportsAFullDisk) {
  const testing::SmallDisk disk(1 << 20);
  if (!disk.is_there()) GTEST_SKIP() << "mounting a tmpfs needs CAP_SYS_ADMIN";
  const auto files = FileMemory::open(disk.folder().path());
  EXPECT_THAT(failure_of([&] { files->zeros(1 << 20, torch::kFloat); }),
              HasSubstr("kUnavailable: reserve 4194304 bytes in folder"));
  EXPECT_EQ(files->used_bytes(), 0);
}

}  // namespace
}  // namespace cadre
