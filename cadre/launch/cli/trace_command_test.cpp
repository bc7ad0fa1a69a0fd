#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cadre/core/collective/op.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/fabric/flight/process_start.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/launch/cli/command.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Writes the records of two ranks. The second rank was killed inside its first all_reduce.
void write_records(const std::string& folder) {
  const Fingerprint call =
      OpDescriptor{OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 8}.fingerprint();
  for (int rank = 0; rank < 2; ++rank) {
    const auto recorder =
        FlightRecorder::create(cadre::format("{}/world-round0-rank{}.flight", folder, rank),
                               {"world", "node0", rank, 2, 4711 + rank, 0})
            .value_or_throw();
    const uint64_t index = recorder->begin(1, call, -1, TimePoint{1000});
    if (rank == 0) {
      recorder->end(index,
                    {.well = false, .waiting_for = 1, .phase = "enter", .now = TimePoint{2000}});
    }
  }
}

TEST(TraceCommand, SaysWhoOwesWhat) {
  const cadre::testing::TemporaryFolder folder;
  write_records(folder.path());
  const auto result = run_cadre({"trace", folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("stopped at #1 all_reduce(sum, float32 x 8)"));
  EXPECT_THAT(result.output, HasSubstr("owes       rank 1 (node0, pid 4712)"));
  EXPECT_THAT(result.output, HasSubstr("the last collective; for each rank"));
  const auto json = nlohmann::json::parse(run_cadre({"trace", "--json", folder.path()}).output);
  EXPECT_EQ(json[0]["stopped_at"], 1);
}

// Returns the trace of one rank of two. That rank has been in its first all_reduce for twelve
// seconds.
std::string text_of_hang(const FlightIdentity& writer) {
  const cadre::testing::TemporaryFolder folder;
  const auto recorder =
      FlightRecorder::create(folder.file("world-round0-rank0.flight"), writer).value_or_throw();
  const TimePoint begin{os::monotonic_now().ns - Duration(std::chrono::seconds(12)).count()};
  recorder->begin(1, OpDescriptor{.kind = OpKind::kAllReduce}.fingerprint(), -1, begin);
  return run_cadre({"trace", folder.path()}).output;
}

TEST(TraceCommand, TheTimeOfALiveHangGoesOn) {
  const os::HostInfo host = os::read_host_info();
  FlightIdentity writer{"world", host.name, 0, 2, host.pid, 0, process_start_of(host.pid)};
  ASSERT_NE(writer.process_start, 0U);
  EXPECT_THAT(text_of_hang(writer), ContainsRegex("was still in it after [1-5][0-9] s"));
  // The trace must not claim in the cases below that the rank is alive: the writer of the record is
  // an earlier process with the same pid, or is on another host, or did not record its start time.
  const auto dead = HasSubstr("was in it when its record ends");
  FlightIdentity reused = writer;
  --reused.process_start;
  EXPECT_THAT(text_of_hang(reused), dead);
  FlightIdentity elsewhere = writer;
  elsewhere.host += "0";
  EXPECT_THAT(text_of_hang(elsewhere), dead);
  FlightIdentity silent = writer;
  silent.process_start = 0;
  EXPECT_THAT(text_of_hang(silent), dead);
}

TEST(TraceCommand, NamesFilesThatAreNoRecordsAndReadsTheOthers) {
  const cadre::testing::TemporaryFolder folder;
  write_records(folder.path());
  std::ofstream(std::filesystem::path(folder.path()) / "torn.flight") << "CDRFLT03 torn";
  const auto result = run_cadre({"trace", folder.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("torn.flight: "));
  EXPECT_THAT(result.output, HasSubstr("stopped at #1"));
}

TEST(TraceCommand, TeachesWhatItNeeds) {
  EXPECT_THAT(run_cadre({"trace", "--help"}).output, HasSubstr("--flight-records"));
  const auto nothing = run_cadre({"trace"});
  EXPECT_EQ(nothing.exit_code, kUsageExitCode);
  EXPECT_THAT(nothing.error, HasSubstr("name a folder or files"));
  const cadre::testing::TemporaryFolder folder;
  const auto empty = run_cadre({"trace", folder.path()});
  EXPECT_EQ(empty.exit_code, 1);
  EXPECT_THAT(empty.error, HasSubstr("is empty: no flight records. Only Cadre's groups keep them"));
  std::ofstream(folder.file("log.txt")) << "text";
  EXPECT_THAT(run_cadre({"trace", folder.path()}).error,
              HasSubstr("has no file that ends in .flight (of 1): no flight records."));
  EXPECT_THAT(run_cadre({"trace", folder.path(), "--last", "x"}).error,
              HasSubstr("--last x: expected a number of rows"));
}

TEST(TraceCommand, ShowsAJobThatAWorkerStartedOnItsOwn) {
  const cadre::testing::TemporaryFolder folder;
  const std::string nested = folder.file("rank1-job2");
  std::filesystem::create_directories(nested + "/rank0-job1");
  std::filesystem::create_directories(folder.file("other"));
  write_records(folder.file("other"));  // other records, which must not be read
  write_records(nested + "/rank0-job1");
  const auto inner = run_cadre({"trace", folder.path()});
  EXPECT_EQ(inner.exit_code, 0) << inner.error;
  EXPECT_THAT(inner.output, HasSubstr("started by a worker: " + nested + "/rank0-job1\ngroup"));
  write_records(folder.path());
  write_records(nested);
  const auto json = nlohmann::json::parse(run_cadre({"trace", "--json", folder.path()}).output);
  ASSERT_EQ(json.size(), 3U);
  for (const auto& group : json) EXPECT_EQ(group["records"].size(), 2U);
  EXPECT_FALSE(json[0].contains("nested_folder"));
  EXPECT_EQ(json[1]["nested_folder"], nested);
}

TEST(TraceCommand, SaysWhichRecordsAreOfAnEarlierJob) {
  const cadre::testing::TemporaryFolder folder;
  write_records(folder.path());
  FlightIdentity earlier{"world", "node0", 2, 3, 4000, 0};
  earlier.connection = 5;
  earlier.made_at_s = -1;  // earlier than the other job, whose time is unknown (0)
  const auto recorder =
      FlightRecorder::create(folder.file("world-round0-rank2.flight"), earlier).value_or_throw();
  const auto result = run_cadre({"trace", folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output,
              HasSubstr("job 1 of 2 whose records lie here, begun 1969-12-31T23:59:59Z"));
  EXPECT_THAT(result.output, HasSubstr("job 2 of 2 whose records lie here (the last one)\n"
                                       "group \"world\", round 0: 2 ranks; records of ranks 0-1"));
  EXPECT_THAT(result.output, Not(HasSubstr("the ranks disagree")));
  const auto json = nlohmann::json::parse(run_cadre({"trace", "--json", folder.path()}).output);
  ASSERT_EQ(json.size(), 2U);
  EXPECT_EQ(json[0]["job"], 1);
  EXPECT_EQ(json[1]["job"], 2);
}

TEST(TraceCommand, TakesOnlyRegularFilesForRecords) {
  const cadre::testing::TemporaryFolder folder;
  write_records(folder.path());
  ASSERT_EQ(::mkfifo(folder.file("pipe.flight").c_str(), 0600), 0);
  // The command must not block on the pipe, to which no process writes.
  const auto result = run_cadre({"trace", folder.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("pipe.flight: is not a regular file"));
  EXPECT_THAT(result.output, HasSubstr("stopped at #1"));
}

TEST(TraceCommand, DoesNotFollowLinksAmongTheRecords) {
  const cadre::testing::TemporaryFolder folder;
  write_records(folder.path());
  for (const char* name : {"rank0-job1", "rank0-job2"}) {
    std::filesystem::create_directory_symlink(".", folder.file(name));
  }
  const auto result = run_cadre({"trace", "--json", folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(nlohmann::json::parse(result.output).size(), 1U);
}

TEST(TraceCommand, NamesOfFilesDoNotReachTheTerminalAsCommands) {
  const cadre::testing::TemporaryFolder folder;
  std::ofstream(folder.file("\x1b[2J.flight")) << "x";
  EXPECT_THAT(run_cadre({"trace", folder.path()}).error, HasSubstr("/\\x1b[2J.flight: "));
}

TEST(TraceCommand, SaysOfANameThatIsNotThereHowToMakeIt) {
  const auto result = run_cadre({"trace", "no/folder"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("there is no file or folder \"no/folder\""));
  EXPECT_THAT(result.error, HasSubstr("cadre run --flight-records no/folder"));
}

TEST(RunFlightRecords, ReachTheWorkersAsAWholePath) {
  const cadre::testing::TemporaryFolder folder;
  const auto result = CadreCommand({"run", "--flight-records", "a/b", "--no-python", "/bin/sh",
                                    "-c", "echo $CADRE_FLIGHT_RECORDS"},
                                   {.shell = "cd " + folder.path().string() + " && exec \"$@\""})
                          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr(" " + folder.file("a/b") + "\n"));
  EXPECT_TRUE(std::filesystem::is_directory(folder.file("a/b")));
}

// Each of two workers starts two jobs. The records of each of these jobs must be in a folder of its
// own.
TEST(RunFlightRecords, OfJobsThatWorkersStartLieInFoldersOfTheirOwn) {
  const cadre::testing::TemporaryFolder folder;
  const std::string cadre = cadre::testing::build_path("bin/cadre");
  const std::string inner = cadre + " run sh -c 'echo $CADRE_FLIGHT_RECORDS'";
  const auto result = run_cadre({"run", "--nproc-per-node", "2", "--flight-records", folder.path(),
                                 "sh", "-c", inner + "; " + inner});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (const char* own : {"rank0-job1", "rank0-job2", "rank1-job1", "rank1-job2"}) {
    EXPECT_TRUE(std::filesystem::is_directory(folder.file(own))) << result.output;
    EXPECT_THAT(result.output, HasSubstr(folder.file(own) + "\n"));
  }
}

}  // namespace
}  // namespace cadre::cli
