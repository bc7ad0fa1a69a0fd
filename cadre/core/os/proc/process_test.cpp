#include "cadre/core/os/proc/process.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <cstdint>
#include <sstream>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

constexpr Duration kPatience = std::chrono::seconds(20);

class ProcessTest : public ::testing::Test {
 protected:
  std::unique_ptr<Process> start_shell(const std::string& script) {
    auto process = Process::start({.executable = "/bin/sh",
                                   .arguments = {"sh", "-c", script},
                                   .environment = {"PATH=/usr/bin:/bin", "GREETING=hello"}});
    if (!process.ok()) throw process.error();
    return *std::move(process);
  }

  bool wait_until(const std::function<bool()>& is_true) {
    const Deadline deadline = system_->deadline_in(kPatience);
    while (!is_true()) {
      if (deadline.has_passed(system_->now())) return false;
      system_->poll({}, system_->deadline_in(std::chrono::milliseconds(5)));
    }
    return true;
  }

  std::optional<ExitStatus> wait(Process& process) {
    std::array items{PollItem{.target = &process.exit_event(), .want_read = true}};
    system_->poll(items, system_->deadline_in(kPatience));
    return process.try_wait();
  }

  std::string read_all(PipeReader& reader) {
    std::string text;
    const Deadline deadline = system_->deadline_in(kPatience);
    while (!deadline.has_passed(system_->now())) {
      std::array<std::byte, 4096> buffer;
      const auto chunk = reader.try_read(buffer);
      text.append(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes);
      if (chunk.has_ended) break;
      std::array items{PollItem{.target = &reader, .want_read = true}};
      system_->poll(items, deadline);
    }
    return text;
  }

  std::unique_ptr<System> system_ = make_native_system();
};

TEST_F(ProcessTest, TellsHowTheChildEnded) {
  EXPECT_EQ(wait(*start_shell("exit 0")), ExitStatus{});
  EXPECT_EQ(wait(*start_shell("exit 42")), ExitStatus{.code = 42});
  const auto killed = wait(*start_shell("kill -TERM $$"));
  ASSERT_TRUE(killed);
  EXPECT_EQ(killed->signal, SIGTERM);
  EXPECT_EQ(killed->shell_code(), 128 + SIGTERM);
}

TEST_F(ProcessTest, GivesEnvironmentAndTakesOutput) {
  auto process = start_shell("echo $GREETING $HOME; echo wrong >&2");
  EXPECT_EQ(read_all(process->standard_output()), "hello\n");
  EXPECT_EQ(read_all(process->standard_error()), "wrong\n");
}

TEST_F(ProcessTest, ResetsSignalsForTheChild) {
  for (const int signal : {SIGPIPE, SIGUSR1, SIGHUP}) ::signal(signal, SIG_IGN);
  sigset_t blocked;
  sigset_t before;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
  auto process = start_shell("sed -nE 's/^Sig(Blk|Ign):[[:space:]]*/0x/p' /proc/self/status");
  std::istringstream masks(read_all(process->standard_output()));
  uint64_t child_blocked = ~0ULL;
  uint64_t child_ignored = ~0ULL;
  masks >> std::hex >> child_blocked >> child_ignored;
  // glibc reserves signals 32 and 33. A process that has inherited them as ignored cannot change
  // that.
  constexpr uint64_t kGlibcOwn = 0b11ULL << 31;
  EXPECT_EQ(child_blocked, 0U);
  EXPECT_EQ(child_ignored & ~kGlibcOwn, 0U);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  for (const int signal : {SIGPIPE, SIGUSR1, SIGHUP}) ::signal(signal, SIG_DFL);
}

TEST_F(ProcessTest, TheChildIgnoresWhatItIsToldTo) {
  const auto process = Process::start(
      {.executable = "/bin/sh",
       .arguments = {"sh", "-c", "sed -nE 's/^SigIgn:[[:space:]]*/0x/p' /proc/self/status"},
       .environment = {"PATH=/usr/bin:/bin"},
       .ignored_signals = {SIGHUP, SIGUSR1}});
  ASSERT_TRUE(process.ok());
  const uint64_t ignored = std::stoull(read_all((*process)->standard_output()), nullptr, 16);
  constexpr uint64_t kGlibcOwn = 0b11ULL << 31;
  EXPECT_EQ(ignored & ~kGlibcOwn, (uint64_t{1} << (SIGHUP - 1)) | (uint64_t{1} << (SIGUSR1 - 1)));
}

TEST_F(ProcessTest, BindsTheChildToCores) {
  cpu_set_t own;
  CPU_ZERO(&own);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  int last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(last, &own)) --last;
  const auto cores_of = [&](std::vector<int> cores) {
    auto process = Process::start({.executable = "/bin/sh",
                                   .arguments = {"sh", "-c", "exec nproc"},
                                   .environment = {"PATH=/usr/bin:/bin"},
                                   .cores = std::move(cores)});
    if (!process.ok()) throw process.error();
    return read_all((*process)->standard_output());
  };
  EXPECT_EQ(cores_of({last}), "1\n");
  EXPECT_EQ(cores_of({}), cadre::format("{}\n", CPU_COUNT(&own)));
}

TEST_F(ProcessTest, SignalsTheWholeGroup) {
  auto process = start_shell("sleep 1000 & echo $!; wait");
  std::array items{PollItem{.target = &process->standard_output(), .want_read = true}};
  ASSERT_TRUE(system_->poll(items, system_->deadline_in(kPatience)));
  std::array<std::byte, 64> buffer;
  const auto chunk = process->standard_output().try_read(buffer);
  const int grandchild =
      std::stoi(std::string(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes));
  process->signal_group(SIGKILL);
  const auto status = wait(*process);
  ASSERT_TRUE(status);
  EXPECT_EQ(status->signal, SIGKILL);
  EXPECT_TRUE(wait_until([&] { return ::kill(grandchild, 0) != 0; })) << grandchild;
}

TEST_F(ProcessTest, TheDestructorEndsTheChild) {
  int pid = 0;
  {
    auto process = start_shell("trap '' TERM; while true; do sleep 0.01; done");
    pid = process->pid();
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST_F(ProcessTest, TheChildDiesWithItsParent) {
  // The parent in the middle starts a child, reports its pid, and is then killed.
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const int parent = ::fork();
  if (parent == 0) {
    auto process = start_shell("while true; do sleep 0.05; done");
    const int pid = process->pid();
    [[maybe_unused]] const ssize_t written = ::write(ends[1], &pid, sizeof(pid));
    ::kill(::getpid(), SIGKILL);
  }
  int child = 0;
  ASSERT_EQ(::read(ends[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  ::close(ends[0]);
  ::close(ends[1]);
  ::waitpid(parent, nullptr, 0);
  EXPECT_TRUE(wait_until([&] { return ::kill(child, 0) != 0; })) << child;
}

TEST_F(ProcessTest, SaysWhyAProgramCannotBeExecuted) {
  const auto missing = Process::start({.executable = "/no/such/program", .arguments = {"x"}});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), ErrorCode::kInvalidArgument);
  const auto folder = Process::start({.executable = "/tmp", .arguments = {"x"}});
  ASSERT_FALSE(folder.ok());
  EXPECT_EQ(folder.error().message(), "\"/tmp\" cannot be executed: Permission denied (errno 13)");
}

}  // namespace
}  // namespace cadre::os
