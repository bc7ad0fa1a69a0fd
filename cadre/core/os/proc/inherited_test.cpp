// Tests what a process inherits: dispositions of signals, limits, standard streams, the umask and
// variables.
#include "cadre/core/os/proc/inherited.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "cadre/core/os/files/file_size.h"
#include "cadre/core/os/files/locked_file.h"
#include "cadre/core/os/files/mapped_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/files/scratch_memory.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

constexpr Duration kProgramPatience = std::chrono::seconds(20);

// Ignores SIGCHLD as long as it exists. A parent may do that before it executes this program.
class ChildrenIgnored {
 public:
  ChildrenIgnored() : previous_(::signal(SIGCHLD, SIG_IGN)) {}
  ~ChildrenIgnored() { ::signal(SIGCHLD, previous_); }
  ChildrenIgnored(const ChildrenIgnored&) = delete;
  ChildrenIgnored& operator=(const ChildrenIgnored&) = delete;

 private:
  sighandler_t previous_;
};

TEST(Inherited, AnEndThatTheKernelDidNotKeepIsNoSuccess) {
  const ChildrenIgnored ignored;
  const auto system = make_native_system();
  auto process = Process::start({.executable = "/bin/sh", .arguments = {"sh", "-c", "exit 3"}});
  ASSERT_TRUE(process.ok());
  std::array items{PollItem{.target = &(*process)->exit_event(), .want_read = true}};
  ASSERT_TRUE(system->poll(items, system->deadline_in(kProgramPatience)));
  const auto status = (*process)->try_wait();
  ASSERT_TRUE(status);
  EXPECT_FALSE(status->is_known);
  EXPECT_FALSE(status->is_success());
  EXPECT_EQ(status->shell_code(), 1);
}

TEST(Inherited, AProgramWhoseEndIsUnknownIsAnErrorWithTheReason) {
  const ChildrenIgnored ignored;
  const auto system = make_native_system();
  const auto output =
      program_output({"sh", "-c", "echo half; exit 3"}, system->deadline_in(kProgramPatience));
  ASSERT_FALSE(output.ok());
  EXPECT_EQ(output.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(output.error().message(),
              HasSubstr("how sh ended is not known: this process ignores SIGCHLD"));
}

TEST(Inherited, ADescriptorIsNeverAStandardStream) {
  const Fd kept(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10));
  ASSERT_TRUE(kept.is_open());
  ::close(STDIN_FILENO);
  {
    const Fd opened(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    EXPECT_GT(opened.get(), STDERR_FILENO);
    EXPECT_LT(::fcntl(STDIN_FILENO, F_GETFD), 0);
    EXPECT_EQ(::fcntl(opened.get(), F_GETFD), FD_CLOEXEC);
    const auto pipe = make_pipe();
    EXPECT_TRUE(pipe.ok());
    EXPECT_NE(::fcntl(pipe->read_end.get(), F_GETFL) & O_NONBLOCK, 0);
  }
  ::dup2(kept.get(), STDIN_FILENO);
}

// The default stack size of threads is the RLIMIT_STACK with which the program was started.
TEST(Inherited, AThreadHasRoomOnASmallStack) {
  pthread_attr_t before;
  pthread_attr_t small;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ::pthread_attr_init(&small);
  ::pthread_attr_setstacksize(&small, 64 << 10);
  ASSERT_EQ(::pthread_setattr_default_np(&small), 0);
  size_t num_bytes = 0;
  {
    NativeThread thread("small", [&] {
      pthread_attr_t own;
      ::pthread_getattr_np(::pthread_self(), &own);
      ::pthread_attr_getstacksize(&own, &num_bytes);
      ::pthread_attr_destroy(&own);
    });
    thread.join();
  }
  ::pthread_setattr_default_np(&before);
  ::pthread_attr_destroy(&small);
  ::pthread_attr_destroy(&before);
  EXPECT_GE(num_bytes, size_t{8} << 20);
}

TEST(Inherited, ATemporaryFolderIsItsUsersWhateverTheUmask) {
  const mode_t before = ::umask(0777);
  const testing::TemporaryFolder parent;
  ::chmod(parent.path().c_str(), S_IRWXU);
  const auto folder = TemporaryFolder::make(parent.path(), "job-");
  ::umask(before);
  ASSERT_TRUE(folder.ok());
  struct stat info {};
  ASSERT_EQ(::stat((*folder)->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700U);
}

TEST(Inherited, ATemporaryFolderHasAnAbsolutePath) {
  const auto folder = TemporaryFolder::make(".", "job-");
  ASSERT_TRUE(folder.ok()) << folder.error().message();
  EXPECT_TRUE((*folder)->path().starts_with('/')) << (*folder)->path();
}

TEST(Inherited, OfAVariableThatIsThereTwiceTheFirstCountsAsForGetenv) {
  std::array entries{std::string("TWICE=first"), std::string("TWICE=second"), std::string("odd"),
                     std::string("ONCE=")};
  std::array<char*, 5> variables{entries[0].data(), entries[1].data(), entries[2].data(),
                                 entries[3].data(), nullptr};
  char** const before = ::environ;
  ::environ = variables.data();
  const Environment environment = read_environment();
  ::environ = before;
  EXPECT_EQ(environment.to_texts(), (std::vector<std::string>{"ONCE=", "TWICE=first"}));
}

TEST(Inherited, SignalsThatAreIgnoredAreListed) {
  const auto before = ::signal(SIGUSR2, SIG_IGN);
  EXPECT_THAT(ignored_signals(), ::testing::Contains(SIGUSR2));
  ::signal(SIGUSR2, before);
  EXPECT_THAT(ignored_signals(), ::testing::Not(::testing::Contains(SIGUSR2)));
}

// Code that lets a file grow checks the limit first, because SIGXFSZ would end the process.
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
    return ::testing::AllOf(
        HasSubstr("this process may make files of 65536 bytes (ulimit -f, LimitFSIZE= of systemd); "
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

// If the path is a pipe, opening must not wait for it, and the pipe must not be removed.
TEST(OutputFiles, APipeIsRefusedAndStays) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const Fd reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  NativeFileSystem files;
  const auto created = files.create(path);
  ASSERT_FALSE(created.ok());
  EXPECT_THAT(created.error().message(), HasSubstr("a pipe, a socket or a device has this name"));
  struct stat info {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0);
}

}  // namespace
}  // namespace cadre::os
