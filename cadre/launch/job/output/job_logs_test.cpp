// Tests the layout of log files and the filters. cadre/launch/cli/run_logs_test.cpp tests the log
// files of whole jobs.
#include "cadre/launch/job/output/job_logs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string content_of(const std::string& path) {
  return *os::read_file(path, size_t{1} << 24);
}

TEST(JobLogs, HaveTorchrunsLayout) {
  const testing::TemporaryFolder folder;
  LogSpec spec{.folder = folder.file("new/logs")};
  spec.redirects.of_all.has_error = true;
  spec.tees.of_rank[1].has_output = true;
  spec.output_filters = {"loss"};
  const auto logs = JobLogs::make(spec, "../a b", "/nowhere").value_or_throw();
  EXPECT_THAT(logs->folder(), MatchesRegex(folder.file("new/logs/_.*_a_b_......")));
  ASSERT_TRUE(logs->begin_attempt(2, 2).ok());
  EXPECT_EQ(logs->rank_folder(2, 1), logs->folder() + "/attempt_2/1");
  const auto exists = [&](const std::string& name) {
    return std::filesystem::exists(logs->folder() + "/attempt_2/" + name);
  };
  EXPECT_TRUE(exists("0/stderr.log"));
  EXPECT_TRUE(exists("1/stderr.log"));
  EXPECT_TRUE(exists("1/stdout.log"));
  EXPECT_FALSE(exists("0/stdout.log"));
  EXPECT_TRUE(exists("filtered_stdout.log"));
  EXPECT_FALSE(exists("filtered_stderr.log"));
  EXPECT_EQ(logs->targets(Stream::kOutput, 0).file, nullptr);
  EXPECT_NE(logs->targets(Stream::kOutput, 0).filter, nullptr);
  EXPECT_FALSE(logs->targets(Stream::kError, 0).is_shown);
  EXPECT_EQ(logs->targets(Stream::kError, 0).filter, nullptr);
  EXPECT_TRUE(logs->targets(Stream::kOutput, 1).is_shown);
}

TEST(JobLogs, StreamsAreShownIfTheirFilesCannotBeMade) {
  const testing::TemporaryFolder folder;
  LogSpec spec{.folder = folder.path().string()};
  spec.redirects.of_all = {.has_output = true, .has_error = true};
  const auto logs = JobLogs::make(spec, "job", "/nowhere").value_or_throw();
  std::filesystem::create_directories(logs->folder() + "/attempt_0/1/stdout.log");
  const Status begun = logs->begin_attempt(0, 2);
  ASSERT_FALSE(begun.ok());
  EXPECT_THAT(begun.error().message(), HasSubstr("attempt_0/1/stdout.log"));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(logs->targets(Stream::kOutput, rank).is_default());
    EXPECT_TRUE(logs->targets(Stream::kError, rank).is_default());
  }
  EXPECT_TRUE(logs->has_failed());
}

class BrokenFile : public os::OutputFile {
 public:
  explicit BrokenFile(int& num_writes) : num_writes_(num_writes) {}
  Status write(ConstBytes) override {
    ++num_writes_;
    return Error(ErrorCode::kUnavailable, "write x: No space left on device");
  }
  Status sync() override { return {}; }

 private:
  int& num_writes_;
};

TEST(LogFile, DropsOutputAfterTheFirstFailure) {
  int num_writes = 0;
  LogFile file(std::make_unique<BrokenFile>(num_writes), "x");
  EXPECT_FALSE(file.failure());
  file.write("one");
  file.write("two");
  EXPECT_EQ(num_writes, 1);
  ASSERT_TRUE(file.failure());
  EXPECT_EQ(file.failure()->message(), "write x: No space left on device");
}

TEST(LineFilter, CopiesLinesWithOneOfTheTexts) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("filtered");
  os::NativeFileSystem files;
  LogFile file(*files.create(path), path);
  const LineFilter filter({"loss", "a,b"}, file);
  LineFilter::Line line;
  LineFilter::Line other;
  filter.add(line, "[0] ", {.bytes = "the lo", .ends_line = false});
  filter.add(other, "[1] ", {.bytes = "lo"});
  filter.add(line, "[0] ", {.bytes = "ss 3", .starts_line = false});
  filter.add(line, "[0] ", {.bytes = "grad"});
  filter.add(other, "[1] ", {.bytes = "xa,bx"});
  EXPECT_EQ(content_of(path), "[0] the loss 3\n[1] xa,bx\n");
}

TEST(LineFilter, KeepsTheBeginningOfALineThatIsTooLong) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("filtered");
  os::NativeFileSystem files;
  LogFile file(*files.create(path), path);
  const LineFilter filter({"loss"}, file);
  LineFilter::Line line;
  const std::string piece(LineSplitter::kMaxPieceBytes, 'x');
  filter.add(line, "", {.bytes = "loss", .ends_line = false});
  for (size_t i = 0; i < 2 * LineFilter::kMaxLineBytes / piece.size(); ++i) {
    filter.add(line, "", {.bytes = piece, .starts_line = false, .ends_line = false});
  }
  EXPECT_EQ(line.bytes.size(), LineFilter::kMaxLineBytes);
  filter.add(line, "", {.bytes = "", .starts_line = false});
  EXPECT_EQ(content_of(path).size(), LineFilter::kMaxLineBytes + 1);
}

}  // namespace
}  // namespace cadre::launch
