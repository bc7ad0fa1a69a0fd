#include "cadre/train/trainer/snapshots/run_origin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

class RunOriginTest : public ::testing::Test {
 protected:
  std::string add(const std::string& name) const {
    std::filesystem::create_directories(folder_.file(name));
    return folder_.file(name);
  }
  SnapshotFolder snapshots() const { return SnapshotFolder(folder_.path()); }

  const cadre::testing::TemporaryFolder folder_;
};

TEST_F(RunOriginTest, ReadsWhatWasWritten) {
  EXPECT_EQ(RunOrigin::read(folder_.path()), std::nullopt);
  const RunOrigin origin = {.step = 40, .abandoned = {60, 50}, .snapshot = "/a folder/step-000040"};
  origin.write(folder_.path());
  EXPECT_EQ(RunOrigin::read(folder_.path()), origin);
}

TEST_F(RunOriginTest, ADamagedRecordIsCorruption) {
  for (const std::string text : {"", "40", "40\n", "40\n\n", "40\nstep-000040", "x\nstep-000040\n",
                                 "40 x\nstep-000040\n", "40 50x\nstep-000040\n"}) {
    std::ofstream(RunOrigin::path_of(folder_.path()), std::ios::binary) << text;
    EXPECT_THAT(cadre::testing::failure_of([&] { (void)RunOrigin::read(folder_.path()); }),
                HasSubstr("kCorruption: " + folder_.path().string() + "/origin is damaged"))
        << text;
  }
}

TEST_F(RunOriginTest, IsFollowedUntilThereIsASnapshotOfItsBranch) {
  RunOrigin{.step = 40, .abandoned = {60}, .snapshot = "/elsewhere/step-000040"}.write(
      folder_.path());
  EXPECT_EQ(followed_origin(snapshots()), "/elsewhere/step-000040");
  add("step-000030");
  add("step-000060");
  EXPECT_EQ(followed_origin(snapshots()), "/elsewhere/step-000040")
      << "one snapshot is of an earlier step, the other one belongs to the abandoned branch";
  add("step-000050");
  EXPECT_EQ(followed_origin(snapshots()), std::nullopt);
}

TEST_F(RunOriginTest, ASnapshotBelowTheRunIsRelativeToIt) {
  RunOrigin{.step = 40, .abandoned = {}, .snapshot = "aside/step-000040"}.write(folder_.path());
  const std::string expected = folder_.file("aside/step-000040");
  EXPECT_EQ(followed_origin(snapshots()), expected);
  EXPECT_THAT(cadre::testing::failure_of([&] { (void)followed_or_latest(snapshots()); }),
              HasSubstr("has continued from " + expected + ", which is no longer there"));
  add("aside/step-000040");
  EXPECT_EQ(followed_or_latest(snapshots()), expected);
}

}  // namespace
}  // namespace cadre::train
