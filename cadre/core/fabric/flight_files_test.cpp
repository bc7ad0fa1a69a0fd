// Tests which files of flight records are kept on the disk, and which users may read them.
#include "cadre/core/fabric/flight_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/fabric/flight/process_start.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/private_folder.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using testing::RankContext;

constexpr Duration kFilesBudget = std::chrono::seconds(20);

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files.push_back(entry.path().filename().string());
  }
  std::ranges::sort(files);
  return files;
}

size_t count_of(const std::vector<std::string>& files, const std::string& prefix) {
  return static_cast<size_t>(std::ranges::count_if(
      files, [&](const std::string& file) { return file.starts_with(prefix); }));
}

FlightIdentity identity_of_this_process(uint64_t start) {
  return {.group = "g",
          .host = os::read_host_info().name,
          .pid = static_cast<int32_t>(::getpid()),
          .process_start = start};
}

// Writes the record of a group. Its writer is this process if `lives` is true, else a process that
// has ended.
void leave_record(const std::string& path, bool is_closed, bool lives) {
  const uint64_t start = process_start_of(static_cast<int>(::getpid()));
  const auto recorder =
      FlightRecorder::create(path, identity_of_this_process(lives ? start : start + 1))
          .value_or_throw();
  if (is_closed) recorder->set_closed();
}

TEST(FlightFiles, AProgramThatSplitsKeepsABoundedNumberOfRecords) {
  const testing::TemporaryFolder folder;
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    CommunicatorOptions options;
    options.flight_record_path = folder.file(format("world-rank{}.flight", context.rank));
    const Deadline deadline = context.system.deadline_in(kFilesBudget);
    const auto world = Communicator::connect(context.system, membership, options, deadline);
    const auto lives = split(*world, {.color = 0, .name = "lives"}, deadline);
    for (int i = 0; i < 30; ++i) {
      const auto group = split(*world, {.color = 0, .name = "short"}, deadline);
      group->barrier();
      group->close(deadline);
    }
    const auto failed = split(*world, {.color = 0, .name = "failed"}, deadline);
    failed->abort("the test");
    static_cast<void>(testing::failure_of([&] { failed->barrier(); }));
    failed->close(deadline);
    for (int i = 0; i < 10; ++i)
      split(*world, {.color = 0, .name = "last"}, deadline)->close(deadline);
    lives->close(deadline);
    world->close(deadline);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  const std::vector<std::string> files = files_in(folder.path());
  for (const char* rank : {"world-rank0", "world-rank1"}) {
    EXPECT_EQ(count_of(files, format("{}.flight", rank)), 1u);
    EXPECT_EQ(count_of(files, format("{}+", rank)), FlightFiles::kMaxClosed + 1);
    EXPECT_EQ(count_of(files, format("{}+lives@", rank)), 1u);
    EXPECT_EQ(count_of(files, format("{}+failed@", rank)), 1u);
    EXPECT_EQ(count_of(files, format("{}+last@", rank)), FlightFiles::kMaxClosed - 1);
  }
  for (const std::string& file : files) {
    const fs::perms mode = fs::status(folder.file(file)).permissions();
    EXPECT_EQ(mode, fs::perms::owner_read | fs::perms::owner_write) << file;
    const auto text = os::read_file(folder.file(file), 1 << 20).value_or_throw();
    EXPECT_TRUE(parse_flight_record(std::as_bytes(std::span(text))).ok()) << file;
  }
}

TEST(FlightFiles, EarlierRecordsCountUnlessTheirGroupsLive) {
  const testing::TemporaryFolder folder;
  for (int i = 0; i < 6; ++i) {
    leave_record(folder.file(format("w-rank1+closed{}@1.flight", i)), true, true);
    leave_record(folder.file(format("w-rank1+ended{}@1.flight", i)), false, false);
  }
  leave_record(folder.file("w-rank1+lives@1.flight"), false, true);
  leave_record(folder.file("w-rank10+other@1.flight"), true, true);
  const FlightFiles files(folder.file("w-rank1.flight"));
  const std::vector<std::string> left = files_in(folder.path());
  EXPECT_EQ(count_of(left, "w-rank1+"), FlightFiles::kMaxClosed + 1);
  EXPECT_EQ(count_of(left, "w-rank1+lives"), 1u);
  EXPECT_EQ(count_of(left, "w-rank10+"), 1u);
}

TEST(FlightFiles, ARejoinedSubgroupHasAFileOfItsOwn) {
  const auto first = GroupIdentity::of_connection("world", 1).child(2, 0);
  const auto second = GroupIdentity::of_connection("world/2.0", 2);
  FlightFiles files("folder/world-rank0.flight");
  const std::string path = files.path_for(first, "half");
  EXPECT_TRUE(path.starts_with("folder/world-rank0+half@")) << path;
  FlightFiles rejoined(path);
  const std::string again = rejoined.path_for_first(second, "half");
  EXPECT_TRUE(again.starts_with("folder/world-rank0+half@")) << again;
  EXPECT_NE(again, path);
  EXPECT_EQ(files.path_for_first(second, "world"), "folder/world-rank0.flight");
  EXPECT_EQ(FlightFiles("").path_for(first, "half"), "");
  EXPECT_EQ(FlightFiles("").path_for_first(first, "half"), "");
}

TEST(FlightFiles, TheFolderIsItsUsersAlone) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("a/b");
  EXPECT_TRUE(os::make_private_folder(path + "/").ok());
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_all);
  EXPECT_TRUE(os::make_private_folder(path).ok()) << "the folder exists already";
  fs::permissions(path, fs::perms::all);
  EXPECT_TRUE(os::make_private_folder(path).ok());
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::all)
      << "the permissions that the user has set are kept";
  EXPECT_FALSE(os::make_private_folder("/proc/none/of/this").ok());
}

}  // namespace
}  // namespace cadre
