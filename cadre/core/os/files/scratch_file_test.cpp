#include "cadre/core/os/files/scratch_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

std::vector<std::byte> pattern(size_t num_bytes, unsigned first) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<std::byte>(first + i * 7);
  return bytes;
}

TEST(ScratchFile, AFolderThatIsNotThereIsNamed) {
  for (const char* folder : {"", "/no/such/folder"}) {
    const auto file = ScratchFile::make(folder);
    ASSERT_FALSE(file.ok());
    EXPECT_EQ(file.error().code(), ErrorCode::kUnavailable);
    EXPECT_EQ(std::string(file.error().message()),
              "make a scratch file in the folder \"" + std::string(folder) +
                  "\", which must exist on a disk: No such file or directory (errno 2)");
  }
}

TEST(ScratchFile, KeepsWhatIsWrittenAndHasNoName) {
  const testing::TemporaryFolder folder;
  const testing::Resources before = testing::count_resources();
  {
    const ScratchFile file = ScratchFile::make(folder.path()).value_or_throw();
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    const auto low = pattern(10'000, 1);
    const auto high = pattern(5'000, 99);
    file.write(1'000'000, high).value_or_throw();
    file.write(3, low).value_or_throw();
    std::vector<std::byte> seen(10'000);
    file.read(3, seen).value_or_throw();
    EXPECT_EQ(seen, low);
    seen.resize(5'000);
    file.read(1'000'000, seen).value_or_throw();
    EXPECT_EQ(seen, high);
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(ScratchFile, NamesWhatItCannotDo) {
  const testing::TemporaryFolder folder;
  const auto missing = ScratchFile::make(folder.file("none"));
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(missing.error().message().find(folder.file("none")), std::string::npos);

  const ScratchFile file = ScratchFile::make(folder.path()).value_or_throw();
  file.write(0, pattern(10, 0)).value_or_throw();
  std::vector<std::byte> bytes(11);
  const Status beyond = file.read(0, bytes);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.error().code(), ErrorCode::kCorruption);
  const testing::FileSizeLimit limit(4096);
  const Status full = file.write(0, pattern(5'000, 0));
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code(), ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace cadre::os
