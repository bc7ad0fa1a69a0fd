#include "cadre/core/os/files/file_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/core/os/files/mapped_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/files/scratch_memory.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

// Sets a limit on the size of files. Code that lets a file grow must check the limit first and
// return an error, because SIGXFSZ would end the process.
class UnderAFileLimit : public ::testing::Test {
 protected:
  static constexpr size_t kLimit = 1 << 16;
  static constexpr size_t kTooLarge = kLimit + 1;

  static std::string refusal_of(const std::function<Status()>& grow) {
    const testing::FileSizeLimit limit(kLimit);
    ::signal(SIGXFSZ, SIG_DFL);
    const Status status = grow();
    if (status.ok()) return "accepted";
    EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
    return status.error().message();
  }

  static ::testing::Matcher<std::string> names_the_limit() {
    return ::testing::AllOf(HasSubstr("this process may make files of at most 65536 bytes (ulimit "
                                      "-f, LimitFSIZE= of systemd); "
                                      "raise that limit"),
                            HasSubstr("File too large (errno 27)"));
  }

  template <typename T>
  static Status status_of(const Result<T>& result) {
    return result.ok() ? Status() : Status(result.error());
  }

  const testing::TemporaryFolder folder_;
  const std::vector<std::byte> large_ = std::vector<std::byte>(kTooLarge);
};

TEST_F(UnderAFileLimit, ASharedSegmentIsRefused) {
  const auto system = make_native_system();
  EXPECT_THAT(refusal_of([&] { return status_of(system->create_segment(kTooLarge)); }),
              names_the_limit());
  EXPECT_EQ(refusal_of([&] { return status_of(system->create_segment(kLimit)); }), "accepted");
}

TEST_F(UnderAFileLimit, AWriteIsRefused) {
  NativeFileSystem files;
  EXPECT_THAT(refusal_of([&]() -> Status {
                auto file = files.create(folder_.file("a"));
                CADRE_RETURN_IF_ERROR((*file)->write(ConstBytes(large_).first(kLimit)));
                return (*file)->write(ConstBytes(large_).first(1));
              }),
              names_the_limit());
}

TEST_F(UnderAFileLimit, AMappedFileIsRefused) {
  EXPECT_THAT(
      refusal_of([&] { return status_of(MappedFile::create(folder_.file("b"), kTooLarge)); }),
      names_the_limit());
}

TEST_F(UnderAFileLimit, ASharedFileIsRefusedAndKeepsItsContent) {
  auto file = LockedFile::open(folder_.file("c"), LockedFile::kReadableByAll).value_or_throw();
  file.append_at(0, ConstBytes(large_).first(kLimit)).value_or_throw();
  EXPECT_THAT(refusal_of([&] { return file.append_at(kLimit, ConstBytes(large_).first(1)); }),
              names_the_limit());
  EXPECT_THAT(refusal_of([&] { return file.truncate(kTooLarge); }), names_the_limit());
  EXPECT_EQ(file.size().value_or_throw(), kLimit);
}

TEST_F(UnderAFileLimit, AScratchFileIsRefused) {
  const auto scratch = ScratchArena::create(folder_.path()).value_or_throw();
  EXPECT_THAT(refusal_of([&] { return scratch->reserve(kTooLarge); }), names_the_limit());
}

// tmpfs ends an allocation with EINTR although the handler asks for a restart of system calls.
TEST(ReserveBlocks, BeginsAgainAfterASignal) {
  const auto folder = TemporaryFolder::make("/dev/shm", "cadre-test-").value_or_throw();
  const PendingSignal alarm(std::array{SIGALRM});
  const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 300},
                        .it_value = {.tv_sec = 0, .tv_usec = 300}};
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  for (int i = 0; i < 300; ++i) {
    const auto file = MappedFile::create(folder->path() + "/file", 1 << 20);
    EXPECT_TRUE(file.ok()) << file.error().message();
  }
  ::setitimer(ITIMER_REAL, &never, nullptr);
  EXPECT_TRUE(alarm.has_arrived());
}

}  // namespace
}  // namespace cadre::os
