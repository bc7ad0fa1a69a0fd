#include "cadre/core/comm/connect.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cadre/core/os/system.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

// The environment variable for the folder, which `cadre run --flight-records` sets, names a folder
// that does not exist. Connecting must create it.
TEST(ConnectFromEnvironment, CreatesTheFolderOfFlightRecords) {
  const testing::TemporaryFolder folder;
  const std::string nested = folder.file("flights/of/today");
  ::setenv("CADRE_FLIGHT_RECORDS", nested.c_str(), 1);
  const auto system = os::make_native_system();
  const auto group =
      connect_from_environment(*system, {}, system->deadline_in(std::chrono::seconds(20)));
  ::unsetenv("CADRE_FLIGHT_RECORDS");
  group->barrier();
  EXPECT_TRUE(std::filesystem::exists(nested + "/world-round0-rank0.flight"));
}

}  // namespace
}  // namespace cadre
