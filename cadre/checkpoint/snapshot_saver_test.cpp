#include "cadre/checkpoint/snapshot_saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/checkpoint/sharded_load.h"
#include "cadre/checkpoint/sharded_snapshot_test.h"
#include "cadre/group/process_group_test_ranks.h"
#include "cadre/testing/temporary_folder.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using snapshot_test::make_parts;
using snapshot_test::Strategy;
using snapshot_test::World;

const World kFlatOnTwo{Strategy::kFlat, 2};

// Every number that a step changes: parameters, buffers, and the optimizer's tensors and counters.
std::vector<torch::Tensor> changing(const SnapshotParts& parts,
                                    const std::vector<ParameterState>& optimizer) {
  std::vector<torch::Tensor> tensors;
  for (const SnapshotTensor& tensor : parts.parameters) tensors.push_back(tensor.values);
  for (const SnapshotTensor& tensor : parts.buffers) {
    if (tensor.values.scalar_type() != at::kBool) tensors.push_back(tensor.values);
  }
  for (const ParameterState& state : optimizer) {
    for (const auto* named : {&state.tensors, &state.scalars}) {
      for (const auto& [name, tensor] : *named) tensors.push_back(tensor);
    }
  }
  return tensors;
}

void fill(const SnapshotParts& parts, double value) {
  const at::NoGradGuard no_grad;
  for (const torch::Tensor& tensor : changing(parts, parts.optimizer)) tensor.fill_(value);
}

bool hold(const std::vector<torch::Tensor>& tensors, double value) {
  return std::ranges::all_of(tensors, [value](const torch::Tensor& tensor) {
    return tensor.eq(value).all().item<bool>();
  });
}

// Training changes the parameters, and exchanges them, while they are written.
TEST(SnapshotSaver, SavesWhatThePartsWereWhenItWasCalled) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    SnapshotSaver saver(SnapshotFolder(run.path()), group);
    const SnapshotParts parts = make_parts(kFlatOnTwo, group.rank(), true);
    for (int step = 1; step <= 5; ++step) {
      fill(parts, step);
      saver.save(step, parts);
      fill(parts, 99);
      group.all_reduce(torch::ones({1000}));
    }
    saver.close();
    for (int step = 1; step <= 5; ++step) {
      const LoadedSnapshot loaded =
          load_sharded(SnapshotFolder(run.path()).path_of(step), parts, group);
      const auto tensors = changing(parts, loaded.optimizer);
      testing::require(tensors.size() == changing(parts, parts.optimizer).size(), "all of them");
      testing::require(hold(tensors, step), cadre::format("step {}", step));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(SnapshotSaver, TheNextCallReportsAFailureOnAllRanks) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotSaver saver(SnapshotFolder(run.path()), group);
    SnapshotParts parts = make_parts(kFlatOnTwo, group.rank(), true);
    SnapshotParts wrong = parts;
    if (group.rank() == 1) wrong.parameters[0].values = torch::zeros({3});
    saver.save(1, wrong);  // fails later
    output = testing::failure_of([&] { saver.save(2, parts); });
    saver.finish();  // the failure is reported once, and the second save is well
    load_sharded(*SnapshotFolder(run.path()).latest(), parts, group);
    saver.close();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_EQ(rank.output,
              "kInvalidArgument: saved in the background: snapshot of step 1: rank 1: 'fc.weight' "
              "has 3 elements on "
              "this rank, but its boxes have 17");
  }
  EXPECT_THAT(SnapshotFolder(run.path()).steps(), ::testing::ElementsAre(2));
}

TEST(SnapshotSaver, WorksInOneProcessAndAfterADiskThatWasInTheWay) {
  const testing::TemporaryFolder run;
  const std::string path = run.file("run");
  std::ofstream(path) << "a file in the way";
  SnapshotSaver saver{SnapshotFolder(path)};
  const SnapshotParts parts = make_parts({Strategy::kReplicated, 1}, 0, true);
  saver.save(1, parts);
  EXPECT_THAT(testing::failure_of([&] { saver.finish(); }),
              ::testing::HasSubstr("make the folder " + path));
  saver.finish();
  fs::remove(path);
  saver.save(2, parts);
  saver.close();
  saver.close();
  EXPECT_EQ(SnapshotFolder(path).latest_step(), 2);
}

TEST(SnapshotSaver, OneThatIsDestroyedWhileItSavesEndsTheWaitsOfTheOthers) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    auto saver = std::make_unique<SnapshotSaver>(SnapshotFolder(run.path()), group);
    const SnapshotParts parts = make_parts(kFlatOnTwo, group.rank(), true);
    if (group.rank() == 0) {
      saver->save(1, parts);
      output = testing::failure_of([&] { saver->finish(); });
    } else {
      saver->save(1, parts);
    }
    saver.reset();
  });
  // Rank 1's part may have been done before it was destroyed; in no case does rank 0 wait for long.
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
