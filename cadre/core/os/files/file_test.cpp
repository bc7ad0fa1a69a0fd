#include "cadre/core/os/files/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

ConstBytes bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

size_t num_files(const testing::TemporaryFolder& folder) {
  const std::filesystem::directory_iterator begin(folder.path());
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

TEST(File, ReadsWhatWasWritten) {
  const testing::TemporaryFolder folder;
  const testing::Resources before = testing::count_resources();
  for (const size_t size : {size_t{0}, size_t{1}, size_t{200'000}}) {
    std::string content(size, 'a');
    for (size_t i = 0; i < size; ++i) content[i] = static_cast<char>(i * 7);
    replace_file(folder.file("data"), bytes_of(content)).value_or_throw();
    EXPECT_EQ(read_file(folder.file("data"), 200'000).value_or_throw(), content);
  }
  EXPECT_EQ(num_files(folder), 1u);
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(File, BoundsWhatItReads) {
  const testing::TemporaryFolder folder;
  replace_file(folder.file("data"), bytes_of("12345")).value_or_throw();
  EXPECT_EQ(read_file(folder.file("data"), 5).value_or_throw(), "12345");
  EXPECT_EQ(read_file(folder.file("data"), 4).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(read_file("/dev/zero", 1 << 20).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(read_file("/proc/self/status", 1 << 16).value_or_throw().empty());
}

TEST(File, NamesWhatIsMissing) {
  const Error error = read_file("/no/such/file", 10).error();
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_EQ(error.message(), "open /no/such/file: No such file or directory (errno 2)");
  EXPECT_EQ(replace_file("/no/such/file", {}).error().code(), ErrorCode::kUnavailable);
}

// Reading a pipe must fail at once: opening it would block until another process opens it for
// writing.
TEST(File, APipeIsRefused) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  for (const std::string& name : {path, std::string("/dev/zero")}) {
    const auto content = read_file(name, 100);
    ASSERT_FALSE(content.ok()) << name;
    EXPECT_EQ(content.error().code(), ErrorCode::kInvalidArgument) << name;
  }
}

TEST(File, AFailedReplaceLeavesNothing) {
  const testing::TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "data" / "inner");
  EXPECT_EQ(replace_file(folder.file("data"), bytes_of("x")).error().code(),
            ErrorCode::kUnavailable);
  EXPECT_EQ(num_files(folder), 1u);
  EXPECT_TRUE(std::filesystem::is_directory(folder.path() / "data" / "inner"));
}

}  // namespace
}  // namespace cadre::os
