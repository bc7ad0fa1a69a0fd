#include "cadre/core/os/host/secret_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using std::filesystem::perms;

TEST(SecretFile, HasTheSecretInItsFirstLine) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("token");
  std::ofstream(path) << "  correct horse \r\nbattery\n";
  std::filesystem::permissions(path, perms::owner_read);
  auto file = read_secret_file(path).value_or_throw();
  EXPECT_EQ(file.secret.view(), "correct horse");
  EXPECT_TRUE(file.is_private);
  std::filesystem::permissions(path, perms::owner_read | perms::others_read);
  file = read_secret_file(path).value_or_throw();
  EXPECT_FALSE(file.is_private);
}

TEST(SecretFile, AnEmptyOrMissingFileIsAnError) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("token");
  EXPECT_EQ(read_secret_file(path).error().code(), ErrorCode::kUnavailable);
  std::ofstream(path) << " \nsecret\n";
  EXPECT_EQ(read_secret_file(path).error().message(),
            "the first line of " + path + " is empty; expected a secret there");
}

}  // namespace
}  // namespace cadre::os
