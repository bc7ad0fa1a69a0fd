#include "cadre/launch/cli/flight_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

class FlightFolderTest : public ::testing::Test {
 protected:
  static std::string prepared(os::Environment environment) {
    const Status status = prepare_flight_folder(environment);
    return status.ok() ? environment.get_or("CADRE_FLIGHT_RECORDS", "none")
                       : status.error().message();
  }
  os::Environment naming(const std::string& path) const {
    os::Environment environment;
    environment.set("CADRE_FLIGHT_RECORDS", path);
    return environment;
  }

  cadre::testing::TemporaryFolder folder_;
};

TEST_F(FlightFolderTest, IsCreatedForItsUserAlone) {
  EXPECT_EQ(prepared({}), "none");
  const std::string path = folder_.file("a/records");
  EXPECT_EQ(prepared(naming(path)), path);
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700U);
}

TEST_F(FlightFolderTest, EachJobOfARankHasAFolderOfItsOwn) {
  os::Environment worker = naming(folder_.path());
  worker.set("RANK", "3");
  EXPECT_EQ(prepared(worker), folder_.path().string()) << "a rank without a launcher";
  worker.set("TORCHELASTIC_RUN_ID", "job");
  EXPECT_EQ(prepared(worker), folder_.file("rank3-job1"));
  EXPECT_EQ(prepared(worker), folder_.file("rank3-job2"));
}

TEST_F(FlightFolderTest, AFileIsNoFolder) {
  std::ofstream(folder_.file("plain")) << "x";
  os::Environment environment = naming(folder_.file("plain"));
  const Status status = prepare_flight_folder(environment);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(status.error().message().find(folder_.file("plain")), std::string::npos);
}

TEST_F(FlightFolderTest, NestedFoldersAreFoundWithoutFollowingLinks) {
  namespace fs = std::filesystem;
  for (const char* name : {"rank1-job2/rank0-job1", "rank1-job1", "rankx-job1", "rank1", "other"}) {
    fs::create_directories(folder_.path() / name);
  }
  std::ofstream(folder_.file("rank2-job1")) << "a file";
  fs::create_directory_symlink(folder_.path(), folder_.path() / "rank4-job1");
  EXPECT_EQ(nested_flight_folders(folder_.path()),
            (std::vector<std::string>{folder_.file("rank1-job1"), folder_.file("rank1-job2"),
                                      folder_.file("rank1-job2/rank0-job1")}));
  EXPECT_EQ(nested_flight_folders(folder_.file("none")), std::vector<std::string>{});
}

}  // namespace
}  // namespace cadre::cli
