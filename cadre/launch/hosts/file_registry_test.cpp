#include "cadre/launch/hosts/file_registry.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/testing/core/registry_conformance.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::launch {
namespace {

class FileHarness {
 public:
  static std::string obstacle() { return {}; }
  explicit FileHarness(os::System& /*system*/) {}

  std::unique_ptr<CoordinatorRegistry> open() {
    return std::make_unique<FileRegistry>(FileRegistry::Options{.job = "bert", .path = path_});
  }
  // The kernel drops the lock when the file is closed.
  void die(std::unique_ptr<CoordinatorRegistry> registry) { registry.reset(); }
  void write(const std::string& text) {
    os::replace_file(path_, wire::as_bytes(text)).value_or_throw();
  }

 private:
  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("claim");
};

INSTANTIATE_TYPED_TEST_SUITE_P(File, RegistryConformance, FileHarness);

class FileRegistryTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }
  FileRegistry open() { return FileRegistry({.job = "bert", .path = path_}); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("claim");
  const Claim first_ = {.agent = 1, .address = "node0:1"};
  const Claim second_ = {.agent = 2, .address = "node1:1"};
};

TEST_F(FileRegistryTest, NoFileIsLeftWhenTheLastClaimWasReleased) {
  FileRegistry registry = open();
  ASSERT_TRUE(registry.claim(first_, soon()).ok());
  ASSERT_TRUE(registry.release(first_.agent, soon()).ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// A holder that is about to end has removed the lock file after this one has opened it.
TEST_F(FileRegistryTest, ALockOnAFileThatWasRemovedIsNone) {
  FileRegistry first = open();
  ASSERT_EQ(*first.claim(first_, soon()), first_);
  std::filesystem::remove(path_ + ".lock");
  FileRegistry second = open();
  ASSERT_EQ(*second.claim(second_, soon()), second_);
  EXPECT_EQ(*first.claim(first_, soon()), second_);
}

TEST_F(FileRegistryTest, AFolderThatDoesNotExistIsNamed) {
  FileRegistry registry({.job = "bert", .path = "/nonexistent/claim"});
  const auto answer = registry.claim(first_, soon());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(answer.error().message().find("/nonexistent/claim.lock"), std::string::npos);
}

TEST_F(FileRegistryTest, EachJobHasAFileOfItsOwnInAFolder) {
  EXPECT_EQ(claim_path(path_, "bert"), path_);
  const std::string folder = folder_.path();
  EXPECT_EQ(claim_path(folder, "bert-1.0_x"), folder + "/cadre-bert-1.0_x.coordinator");
  EXPECT_EQ(claim_path(folder, "../a%"), folder + "/cadre-..%2fa%25.coordinator");
}

}  // namespace
}  // namespace cadre::launch
