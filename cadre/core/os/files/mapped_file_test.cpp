#include "cadre/core/os/files/mapped_file.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

TEST(MappedFile, IsZeroedAndSharedWithItsFile) {
  const testing::TemporaryFolder folder;
  const testing::Resources before = testing::count_resources();
  {
    const MappedFile file = MappedFile::create(folder.file("ring"), 10'000).value_or_throw();
    ASSERT_EQ(file.bytes().size(), 10'000u);
    EXPECT_TRUE(std::all_of(file.bytes().begin(), file.bytes().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
    std::memcpy(file.bytes().data() + 9'000, "hello", 5);
    const std::string content = read_file(folder.file("ring"), 10'000).value_or_throw();
    EXPECT_EQ(content.size(), 10'000u);
    EXPECT_EQ(content.substr(9'000, 5), "hello");
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(MappedFile, KeepsWhatAKilledProcessWrote) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("ring");
  const auto result = testing::run_ranks_as_processes(1, [&](testing::RankContext&) {
    const MappedFile file = MappedFile::create(path, 4096).value_or_throw();
    std::memcpy(file.bytes().data(), "last words", 10);
    ::raise(SIGKILL);
  });
  EXPECT_EQ(result.ranks[0].signal, SIGKILL);
  EXPECT_EQ(read_file(path, 4096).value_or_throw().substr(0, 10), "last words");
}

TEST(MappedFile, LeavesTheFormerFileToItsReader) {
  const testing::TemporaryFolder folder;
  const MappedFile first = MappedFile::create(folder.file("ring"), 100).value_or_throw();
  first.bytes()[0] = std::byte{1};
  const MappedFile second = MappedFile::create(folder.file("ring"), 200).value_or_throw();
  EXPECT_EQ(first.bytes()[0], std::byte{1});
  EXPECT_EQ(second.bytes()[0], std::byte{0});
}

TEST(MappedFile, NamesWhatCannotBeMade) {
  EXPECT_EQ(MappedFile::create("/no/such/folder/ring", 100).error().code(),
            ErrorCode::kUnavailable);
  const testing::TemporaryFolder folder;
  EXPECT_EQ(MappedFile::create(folder.file("ring"), 0).error().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace cadre::os
