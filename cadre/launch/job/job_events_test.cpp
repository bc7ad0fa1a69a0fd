#include "cadre/launch/job/job_events.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "cadre/core/os/files/file.h"
#include "cadre/launch/agent/table.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::launch {
namespace {

// The fields and their order are those of torchelastic 2.13.
TEST(JobEvents, AreInTheFormatOfTorchelastic) {
  const JobIdentity job{.num_workers = 4, .run_id = "seven", .restart_count = 2};
  const EventContext context{.job = job,
                             .host = "node0",
                             .entry_point = "train",
                             .timestamp_ms = 1700000000123,
                             .total_run_time = std::chrono::milliseconds(61900)};
  EXPECT_EQ(
      to_json({.state = "FAILED",
               .rank = 3,
               .pid = 4711,
               .exit_code = 5,
               .duration = std::chrono::milliseconds(1500),
               .error = "{\"message\": 1}"},
              context),
      R"({"name":"torchelastic.worker.status.FAILED","source":"WORKER","timestamp":1700000000123,)"
      R"("metadata":{"run_id":"seven","global_rank":3,"group_rank":0,"worker_id":"4711",)"
      R"("role":"default","hostname":"node0","state":"FAILED","total_run_time":61,)"
      R"("rdzv_backend":"static","raw_error":"{\"message\": 1}",)"
      R"("metadata":"{\"group_world_size\":1,\"entry_point\":\"train\",\"local_rank\":[3],)"
      R"(\"role_rank\":[3],\"role_world_size\":[4],\"exit_code\":[5],\"worker_pid\":[4711]}",)"
      R"("agent_restarts":2,"duration_ms":1500.0}})");
  const auto agent = nlohmann::json::parse(to_json({.state = "RENDEZVOUS"}, context));
  EXPECT_EQ(agent["source"], "AGENT");
  EXPECT_TRUE(agent["metadata"]["global_rank"].is_null());
  EXPECT_TRUE(agent["metadata"]["duration_ms"].is_null());
  EXPECT_EQ(agent["metadata"]["metadata"], R"({"group_world_size":1,"entry_point":"train"})");
}

TEST(JobEvents, HaveTheRanksOfAJobOnSeveralHosts) {
  JobIdentity job{.num_workers = 2};
  job.ranks = HostRanks{.group_rank = 1,
                        .num_hosts = 3,
                        .local_world_size = 2,
                        .first_rank = 4,
                        .world_size = 7,
                        .first_role_rank = 1,
                        .role_world_size = 5};
  const auto event =
      nlohmann::json::parse(to_json({.state = "START", .rank = 5, .pid = 9}, {.job = job}));
  EXPECT_EQ(event["metadata"]["global_rank"], 5);
  EXPECT_EQ(event["metadata"]["group_rank"], 1);
  EXPECT_EQ(event["metadata"]["rdzv_backend"], "c10d");
  EXPECT_EQ(event["metadata"]["metadata"],
            R"({"group_world_size":3,"entry_point":"","local_rank":[1],"role_rank":[2],)"
            R"("role_world_size":[5],"exit_code":[null],"worker_pid":[9]})");
}

TEST(JobEvents, ReplaceBytesThatAreNoText) {
  const JobIdentity job;
  const auto event = nlohmann::json::parse(
      to_json({.state = "FAILED", .rank = 0, .error = "a\xff"}, {.job = job}));
  EXPECT_EQ(event["metadata"]["raw_error"], "a\xEF\xBF\xBD");
}

TEST(JobEvents, AreAppendedToTheFileLineByLine) {
  const testing::TemporaryFolder folder;
  BufferedOutput console(os::OutputStream::Target::kStandardError);
  const JobIdentity job;
  const auto events = JobEvents::open({.file = folder.file("events")}, console);
  ASSERT_TRUE(events.ok()) << events.error().message();
  (*events)->write({.state = "RENDEZVOUS"}, {.job = job});
  (*events)->write({.state = "SUCCEEDED"}, {.job = job});
  const std::string text = *os::read_file(folder.file("events"), 1 << 20);
  EXPECT_EQ(std::ranges::count(text, '\n'), 2);
  EXPECT_EQ((*events)->take_failure(), std::nullopt);
  EXPECT_TRUE(console.is_empty());
  EXPECT_FALSE(JobEvents::open({.file = folder.file("no/events")}, console).ok());
}

}  // namespace
}  // namespace cadre::launch
