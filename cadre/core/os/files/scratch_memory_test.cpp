#include "cadre/core/os/files/scratch_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/small_disk.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<ScratchArena> scratch_in(const testing::TemporaryFolder& folder) {
  return ScratchArena::create(folder.path()).value_or_throw();
}

bool is_zeroed(const ScratchMemory& memory) {
  return std::ranges::all_of(memory.bytes(), [](std::byte b) { return b == std::byte{0}; });
}

TEST(ScratchMemory, GivesZeroedMemoryInWholePages) {
  const testing::TemporaryFolder folder;
  const testing::Resources before = testing::count_resources();
  {
    auto file = scratch_in(folder);
    ScratchMemory first = file->allocate(10'000).value_or_throw();
    std::memset(first.bytes().data(), 1, first.bytes().size());
    ScratchMemory second = file->allocate(1).value_or_throw();
    EXPECT_EQ(first.bytes().size(), ScratchArena::in_pages(10'000));
    EXPECT_EQ(second.bytes().size(), ScratchArena::in_pages(1));
    EXPECT_TRUE(is_zeroed(second));
    first = std::move(second);  // destroys the memory that `first` had before
    file.reset();               // the memory keeps the file alive
    first.bytes()[5] = std::byte{7};
    EXPECT_EQ(first.bytes()[5], std::byte{7});
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(ScratchMemory, HasNoNameAndLeavesNothingWhenItsProcessIsKilled) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_processes(1, [&](testing::RankContext&) {
    const ScratchMemory memory = scratch_in(folder)->allocate(1 << 20).value_or_throw();
    std::memset(memory.bytes().data(), 1, memory.bytes().size());
    if (std::filesystem::is_empty(folder.path())) ::raise(SIGKILL);
  });
  EXPECT_EQ(result.ranks[0].signal, SIGKILL) << "a name was there: " << result.failures();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ScratchMemory, NamesTheFolderThatIsMissing) {
  for (const char* folder : {"", "/no/such/folder"}) {
    const auto made = ScratchArena::create(folder);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code(), ErrorCode::kUnavailable);
    EXPECT_EQ(std::string(made.error().message()),
              "make a scratch file in the folder \"" + std::string(folder) +
                  "\", which must exist on a disk: No such file or directory (errno 2)");
  }
}

TEST(ScratchMemory, RefusesToGrowBeyondTheLimitOfTheProcess) {
  const testing::TemporaryFolder folder;
  const auto file = scratch_in(folder);
  const ScratchMemory held = file->allocate(4096).value_or_throw();
  const testing::FileSizeLimit limit(1 << 20);
  ::signal(SIGXFSZ, SIG_DFL);  // the default action ends the process
  const Status status = file->reserve(1 << 20);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(status.error().message(), HasSubstr("may make files of at most 1048576 bytes"));
  EXPECT_TRUE(file->reserve(4096).ok());
}

TEST(ScratchMemory, StaysWholeWhenAForkedChildDestroysItsCopy) {
  const testing::TemporaryFolder folder;
  auto memory =
      std::make_unique<ScratchMemory>(scratch_in(folder)->allocate(4096).value_or_throw());
  memory->bytes()[0] = std::byte{3};
  const auto result =
      testing::run_ranks_as_processes(1, [&](testing::RankContext&) { memory.reset(); });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(memory->bytes()[0], std::byte{3});
}

TEST(ScratchMemory, ReportsAFullDiskBeforeItsMemoryIsUsed) {
  const testing::SmallDisk disk(1 << 20);
  if (!disk.is_there()) GTEST_SKIP() << "mounting a tmpfs needs CAP_SYS_ADMIN";
  const auto file = scratch_in(disk.folder());
  const auto too_much = file->allocate(2 << 20);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(too_much.error().message(), HasSubstr("reserve 2097152 bytes"));
  EXPECT_THAT(too_much.error().message(), HasSubstr("has 1048576 bytes free"));
  EXPECT_THAT(too_much.error().message(), HasSubstr("No space left on device"));
  // The failed calls must not have taken space, and space that was released must be usable again.
  for (int i = 0; i < 3; ++i) {
    const auto memory = file->allocate(900 << 10);
    ASSERT_TRUE(memory.ok()) << memory.error().message();
    std::memset(memory.value().bytes().data(), 1, memory.value().bytes().size());
  }
  ASSERT_TRUE(file->reserve(900 << 10).ok());
  EXPECT_FALSE(scratch_in(disk.folder())->reserve(900 << 10).ok())
      << "only the first arena has reserved blocks";
  EXPECT_TRUE(file->allocate(900 << 10).ok()) << "the blocks were reserved for this arena";
}

}  // namespace
}  // namespace cadre::os
