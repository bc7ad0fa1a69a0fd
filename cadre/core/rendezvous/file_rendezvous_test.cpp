#include "cadre/core/rendezvous/file_rendezvous.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

TEST(FileRendezvous, AUrlHasAnAbsolutePath) {
  EXPECT_EQ(parse_file_url("file:///shared/job").value(), "/shared/job");
  for (const char* wrong : {"file://relative", "file:///", "tcp://host:1", ""}) {
    const auto refused = parse_file_url(wrong);
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
  }
}

TEST(FileRendezvous, RanksMeetAtAFile) {
  const auto system = os::make_native_system();
  testing::TemporaryFolder folder;
  const std::string path = folder.file("job");
  std::vector<std::unique_ptr<os::Thread>> threads;
  std::vector<std::string> read(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.push_back(system->spawn("rank", [&, rank] {
      auto membership = FileRendezvous(*system, {.path = path, .rank = rank, .world_size = 3})
                            .join(system->deadline_in(std::chrono::seconds(20)));
      ASSERT_TRUE(membership.ok()) << membership.error().message();
      EXPECT_EQ(membership->listen_hosts, std::vector<std::string>{"127.0.0.1"});
      ASSERT_TRUE(membership->store
                      ->set(format("k{}", rank), "v", system->deadline_in(std::chrono::seconds(20)))
                      .ok());
      read[rank] =
          membership->store
              ->get(format("k{}", (rank + 1) % 3), system->deadline_in(std::chrono::seconds(20)))
              .value();
      ASSERT_TRUE(
          membership->store->barrier("done", 3, system->deadline_in(std::chrono::seconds(20)))
              .ok());
    }));
  }
  for (auto& thread : threads) thread->join();
  EXPECT_EQ(read, (std::vector<std::string>(3, "v")));
  EXPECT_FALSE(std::filesystem::exists(path)) << "the last to leave removes the file";
}

}  // namespace
}  // namespace cadre
