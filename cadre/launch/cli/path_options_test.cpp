#include "cadre/launch/cli/path_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

class PathOptionsTest : public ::testing::Test {
 protected:
  static std::string said_of_file(const std::string& path) {
    const GivenOption given{.name = "--out", .spelling = "--out", .value = path};
    const Status status = check_output_file(&given);
    return status.ok() ? "accepted" : status.error().message();
  }
  static std::string said_of_folder(const std::string& path) {
    const Status status =
        check_output_folder({.name = "--out", .spelling = "--out", .value = path});
    return status.ok() ? "accepted" : status.error().message();
  }

  cadre::testing::TemporaryFolder folder_;
};

TEST_F(PathOptionsTest, ANewOrARegularFileInAFolderIsAccepted) {
  std::ofstream(folder_.file("old")) << "x";
  EXPECT_EQ(said_of_file(folder_.file("old")), "accepted");
  EXPECT_EQ(said_of_file(folder_.file("new")), "accepted");
  EXPECT_EQ(said_of_file("new"), "accepted");
  EXPECT_FALSE(std::filesystem::exists(folder_.file("new")));
  EXPECT_TRUE(check_output_file(nullptr).ok());
}

TEST_F(PathOptionsTest, WhatIsNoFileIsRefusedWithTheOption) {
  const std::string pipe = folder_.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(said_of_file(""), "--out needs a value");
  EXPECT_EQ(said_of_file(folder_.path()),
            "--out " + folder_.path().string() + ": that is a folder; expected the name of a file");
  EXPECT_THAT(said_of_file(folder_.file("new/")), ::testing::HasSubstr("that is a folder"));
  EXPECT_EQ(
      said_of_file(pipe),
      "--out " + pipe + ": that is a pipe, a socket or a device; expected the name of a file");
  EXPECT_EQ(said_of_file(folder_.file("none/file")), "--out " + folder_.file("none/file") +
                                                         ": the folder " + folder_.file("none") +
                                                         " does not exist; create it first");
}

TEST_F(PathOptionsTest, AFolderMayBeMissingAndIsNoFile) {
  std::ofstream(folder_.file("plain")) << "x";
  EXPECT_EQ(said_of_folder(folder_.path()), "accepted");
  EXPECT_EQ(said_of_folder(folder_.file("a/b/c")), "accepted");
  EXPECT_EQ(said_of_folder(""), "--out needs a value");
  EXPECT_THAT(said_of_folder(folder_.file("plain")), ::testing::HasSubstr("that is a file"));
}

}  // namespace
}  // namespace cadre::cli
