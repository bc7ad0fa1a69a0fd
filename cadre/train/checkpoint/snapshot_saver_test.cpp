#include "cadre/train/checkpoint/snapshot_saver.h"

#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/forwarding_files.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/train/checkpoint/on_file_system.h"
#include "cadre/train/checkpoint/sharded_load.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;

const World kFlatOnTwo{Division::kFlat, 2};

// Returns every tensor that a training step changes: parameters, buffers, and the optimizer's
// states and step counters.
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

// Training changes and replaces the parameters while the background thread writes their copies.
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
      testing::require(tensors.size() == changing(parts, parts.optimizer).size(),
                       "the snapshot lacks a state");
      testing::require(hold(tensors, step), cadre::format("step {}", step));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two stages of a pipeline tie a weight: rank 0 writes it and rank 1 has a copy. The save on rank 1
// must list its name, too.
TEST(SnapshotSaver, ARankWithACopyOfATensorHasItsName) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    SnapshotFolder folder(run.path());
    SnapshotParts parts;
    parts.parameters = {whole_tensor("w", torch::full({3}, group.rank() + 1.0))};
    parts.parameters[0].is_copy = group.rank() == 1;
    parts.optimizer = {
        {.parameter = "w", .tensors = {{"exp_avg", torch::full({3}, group.rank() + 3.0)}}}};
    check_savable(parts, group);
    save_sharded(folder, 1, parts, group);
    SnapshotSaver saver(folder, group);
    saver.save(2, parts);
    saver.close();
    for (const int64_t step : {1, 2}) {
      parts.parameters[0].values.zero_();
      const LoadedSnapshot loaded = load_sharded(folder.path_of(step), parts, group);
      testing::require(parts.parameters[0].values.eq(1).all().item<bool>(),
                       "the weight was not loaded");
      testing::require(loaded.optimizer.at(0).tensors.at(0).tensor.eq(3).all().item<bool>(),
                       "the state of the weight was not loaded");
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
    saver.save(1, wrong);  // this save fails in the background
    output = testing::failure_of([&] { saver.save(2, parts); });
    saver.finish();  // the second save() has thrown the error of the first one, and has itself
                     // succeeded
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
  const SnapshotParts parts = make_parts({Division::kReplicated, 1}, 0, true);
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

// A file system in which creating the folder of a snapshot takes some time.
class SlowFiles final : public testing::ForwardingFiles {
 public:
  Result<std::string> make_folder_beside(const std::string& path) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return ForwardingFiles::make_folder_beside(path);
  }
};

TEST(SnapshotSaver, TheEndOfItsScopeFinishesTheLastSave) {
  const testing::TemporaryFolder run;
  SlowFiles files;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    SnapshotSaver saver(snapshot_folder_on(files, run.path()), group);
    saver.save(7, make_parts(kFlatOnTwo, group.rank(), true));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(SnapshotFolder(run.path()).latest_step(), 7);
}

// All ranks throw exceptions after they have begun the save. The destructor finishes it.
TEST(SnapshotSaver, AnExceptionAfterTheSaveLosesNothing) {
  const testing::TemporaryFolder run;
  SlowFiles files;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    (void)testing::failure_of([&] {
      SnapshotSaver saver(snapshot_folder_on(files, run.path()), group);
      saver.save(7, make_parts(kFlatOnTwo, group.rank(), true));
      throw std::runtime_error("after the save");
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(SnapshotFolder(run.path()).latest_step(), 7);
}

// Rank 1 throws before it begins a save that rank 0 has begun. Rank 0 must notice that, and
// report the lost snapshot long before the timeout.
TEST(SnapshotSaver, ASaveThatOneRankNeverBeginsIsReportedAsLost) {
  const testing::TemporaryFolder run;
  ::testing::internal::CaptureStderr();
  const auto start = std::chrono::steady_clock::now();
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    output = testing::failure_of([&] {
      SnapshotSaver saver(SnapshotFolder(run.path()), group);
      if (group.rank() == 1) throw std::runtime_error("before the save");
      saver.save(7, make_parts(kFlatOnTwo, group.rank(), true));
    });
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, "");
  EXPECT_THAT(log, ::testing::HasSubstr("the snapshot of step 7 is lost"));
  EXPECT_THAT(log, ::testing::HasSubstr("error"));
  EXPECT_THAT(log, ::testing::HasSubstr("rank 1"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, testing::kRankTimeout);
  EXPECT_EQ(SnapshotFolder(run.path()).latest_step(), std::nullopt);
}

TEST(SnapshotSaver, AnErrorThatNoCallHasThrownIsWrittenToStandardError) {
  const testing::TemporaryFolder run;
  const std::string path = run.file("run");
  std::ofstream(path) << "a file in the way";
  ::testing::internal::CaptureStderr();
  {
    SnapshotSaver saver{SnapshotFolder(path)};
    saver.save(3, make_parts({Division::kReplicated, 1}, 0, true));
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::AllOf(::testing::HasSubstr("the snapshot of step 3 is lost"),
                               ::testing::HasSubstr("make the folder " + path)));
}

TEST(SnapshotSaver, PartsThatOneRankCannotCopyFailTheSaveOnAllRanks) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotSaver saver(SnapshotFolder(run.path()), group);
    SnapshotParts parts = make_parts(kFlatOnTwo, group.rank(), true);
    SnapshotParts wrong = parts;
    if (group.rank() == 1) wrong.parameters[0].values = torch::ones({17}).to_sparse();
    saver.save(1, wrong);
    output = testing::failure_of([&] { saver.finish(); });
    saver.save(2, parts);
    saver.close();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output, ::testing::HasSubstr("rank 1: "));
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  EXPECT_THAT(SnapshotFolder(run.path()).steps(), ::testing::ElementsAre(2));
}

TEST(SnapshotSaver, ASaveInInferenceModeIsFollowedByOneOutsideOfIt) {
  const testing::TemporaryFolder run;
  SnapshotSaver saver{SnapshotFolder(run.path())};
  const SnapshotParts parts = make_parts({Division::kReplicated, 1}, 0, true);
  {
    const c10::InferenceMode mode;
    saver.save(1, parts);
  }
  saver.save(2, parts);
  saver.close();
  EXPECT_THAT(SnapshotFolder(run.path()).steps(), ::testing::ElementsAre(1, 2));
}

TEST(SnapshotSaver, RanksThatSaveDifferentStepsAreRefused) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotFolder folder(run.path());
    const SnapshotParts parts = make_parts(kFlatOnTwo, group.rank(), true);
    output = testing::failure_of([&] { save_sharded(folder, 4 + group.rank(), parts, group); });
    save_sharded(folder, 6, parts, group);
    output += testing::failure_of([&] {
      load_sharded(folder.path_of(6), parts, group, {.with_digests = group.rank() == 0});
    });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              ::testing::HasSubstr("rank 1 saves a snapshot of step 5, but rank 0 a snapshot of "
                                   "step 4"));
  EXPECT_THAT(result.ranks[0].output, ::testing::HasSubstr("with_digests of the options is not"));
  EXPECT_THAT(SnapshotFolder(run.path()).steps(), ::testing::ElementsAre(6));
}

TEST(SnapshotFolder, OneThatWasMovedFromIsUsable) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  const SnapshotFolder taken = std::move(folder);
  EXPECT_EQ(folder.run_folder(), run.path());  // NOLINT(bugprone-use-after-move): defined
  EXPECT_TRUE(folder.steps().empty());
}

// Rank 1 does not save, so the save of rank 0 cannot end; close() gives up after its timeout.
TEST(SnapshotSaver, CloseGivesUpASaveThatDoesNotEndWithinTheTimeout) {
  const testing::TemporaryFolder run;
  const auto start = std::chrono::steady_clock::now();
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotSaver saver(SnapshotFolder(run.path()), group);
    EXPECT_THAT(testing::failure_of([&] { saver.close(Duration(0)); }),
                ::testing::HasSubstr("the timeout is not positive"));
    if (group.rank() == 1) return group.barrier();
    saver.save(7, make_parts(kFlatOnTwo, group.rank(), true));
    output = testing::failure_of([&] { saver.close(std::chrono::milliseconds(30)); });
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output,
              ::testing::HasSubstr("rank 0 closes the saver, but the snapshot of step 7 was not "
                                   "saved within 30 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, testing::kRankTimeout / 2);
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
  // Rank 1 may have finished its part of the save before its destructor ran, or not. In both cases
  // rank 0 must not wait for long.
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
