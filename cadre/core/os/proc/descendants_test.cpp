#include "cadre/core/os/proc/descendants.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/process_stat.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

class DescendantsTest : public ::testing::Test {
 protected:
  // Undoes become_subreaper(): orphans of later tests become children of the init process again.
  ~DescendantsTest() override { ::prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0); }

  bool wait_until(const std::function<bool()>& is_true) {
    const Deadline deadline = system_->deadline_in(std::chrono::seconds(20));
    while (!is_true()) {
      if (deadline.has_passed(system_->now())) return false;
      system_->poll({}, system_->deadline_in(std::chrono::milliseconds(2)));
    }
    return true;
  }

  const std::unique_ptr<System> system_ = make_native_system();
};

// A grandchild in another session must be found. Its parent ends at once, so this process, a
// subreaper, becomes its parent.
TEST_F(DescendantsTest, FindsDescendantsInOtherSessions) {
  become_subreaper();
  const int child = ::fork();
  if (child == 0) {
    if (::fork() == 0) {
      ::setsid();
      ::signal(SIGTERM, SIG_IGN);
      ::execl("/bin/sleep", "sleep", "1000", nullptr);
    }
    ::_exit(0);
  }
  ASSERT_TRUE(reap(child).is_success());
  std::vector<Descendant> found;
  ASSERT_TRUE(wait_until([&] {
    found = list_descendants();
    return std::ranges::any_of(found, [](const auto& one) { return one.name == "sleep"; });
  }));
  ASSERT_TRUE(has_children());
  std::vector<int> pids;
  for (const Descendant& one : found) pids.push_back(one.pid);
  reap_orphans(pids);  // reaps only orphans of other tests
  EXPECT_TRUE(list_descendants(pids).empty());
  EXPECT_FALSE(has_children(pids));
  Descendant stranger = found.front();
  stranger.start_time += 1;  // now it looks like an earlier process with the same pid
  signal_processes(std::span(&stranger, 1), SIGKILL);
  EXPECT_FALSE(list_descendants().empty());
  EXPECT_TRUE(wait_until([&] {
    signal_processes(list_descendants(), SIGKILL);
    reap_orphans({});
    return !has_children();
  }));
}

TEST_F(DescendantsTest, OnesThatAreSparedAreLeftToTheirOwners) {
  const int child = ::fork();
  if (child == 0) ::_exit(7);
  ASSERT_TRUE(wait_until([&] {
    const std::vector<Descendant> living = list_descendants();
    return std::ranges::find(living, child, &Descendant::pid) == living.end();
  }));
  reap_orphans(std::vector{child});
  EXPECT_TRUE(has_children());
  EXPECT_EQ(reap(child), (ExitStatus{.code = 7}));
}

// A process whose signals stay pending: it waits in the kernel for the end of its own child, as the
// caller of vfork() does. After let_it_run() it receives them and sleeps. As root it belongs to
// `num_groups` groups.
class WaitingChild {
 public:
  explicit WaitingChild(size_t num_groups = 0) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      std::vector<gid_t> groups(num_groups);
      std::iota(groups.begin(), groups.end(), 100'000);
      if (num_groups > 0) static_cast<void>(::setgroups(num_groups, groups.data()));
      // vfork() itself is a plain fork() under a sanitizer.
      if (::syscall(SYS_clone, CLONE_VFORK | SIGCHLD, nullptr, nullptr, nullptr, nullptr) == 0) {
        const int self = static_cast<int>(::syscall(SYS_getpid));
        [[maybe_unused]] const ssize_t written = ::write(ends[1], &self, sizeof(self));
      }
      while (true) ::pause();
    }
    EXPECT_EQ(::read(ends[0], &awaited_, sizeof(awaited_)), ssize_t{sizeof(awaited_)});
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~WaitingChild() {
    if (awaited_ > 0) ::kill(awaited_, SIGKILL);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  int pid() const { return pid_; }
  void continue_if_stopped() const {
    const Descendant self{.pid = pid_, .start_time = read_process_stat(pid_).value().start_time};
    continue_stopped(std::span(&self, 1));
  }
  void let_it_run() { ::kill(std::exchange(awaited_, 0), SIGKILL); }
  // Returns true once after each stop.
  bool is_stopped() const {
    int status = 0;
    return ::waitpid(pid_, &status, WNOHANG | WUNTRACED) == pid_ && WIFSTOPPED(status);
  }
  // Returns whether the child sleeps in pause().
  bool is_asleep() const {
    std::ifstream stat(cadre::format("/proc/{}/stat", pid_));
    std::string text(std::istreambuf_iterator<char>(stat), {});
    return text.find(") S ") != std::string::npos;
  }

 private:
  int pid_ = 0;
  int awaited_ = 0;
};

TEST_F(DescendantsTest, AStopThatIsPendingForTheProcessIsTakenBack) {
  WaitingChild child;
  ::kill(child.pid(), SIGSTOP);
  child.continue_if_stopped();
  child.let_it_run();
  EXPECT_TRUE(wait_until([&] { return child.is_asleep(); }));
  EXPECT_FALSE(child.is_stopped());
}

TEST_F(DescendantsTest, AProcessThatHasStoppedIsContinued) {
  WaitingChild child;
  child.let_it_run();
  ::kill(child.pid(), SIGSTOP);
  EXPECT_TRUE(wait_until([&] { return child.is_stopped(); }));
  child.continue_if_stopped();
  EXPECT_TRUE(wait_until([&] { return child.is_asleep(); }));
}

// The ids of the groups come before the pending signals in /proc/PID/status.
TEST_F(DescendantsTest, ThePendingStopOfAProcessOfManyGroupsIsTakenBack) {
  WaitingChild child(2000);
  ::kill(child.pid(), SIGSTOP);
  child.continue_if_stopped();
  child.let_it_run();
  EXPECT_TRUE(wait_until([&] { return child.is_asleep(); }));
}

TEST_F(DescendantsTest, AProcessStaysTheSameWhenItsNameOrGroupChanges) {
  const Descendant one{.pid = 7, .start_time = 8, .process_group = 7, .name = "sh"};
  EXPECT_EQ(one, (Descendant{.pid = 7, .start_time = 8, .process_group = 9, .name = "sleep"}));
  EXPECT_NE(one, (Descendant{.pid = 7, .start_time = 9, .process_group = 7, .name = "sh"}));
}

// LeakSanitizer stops the threads of a program that ends in the same way.
TEST_F(DescendantsTest, ADebuggerThatAttachesStillGetsItsStop) {
  WaitingChild child;
  ASSERT_EQ(::ptrace(PTRACE_ATTACH, child.pid(), nullptr, nullptr), 0);
  child.continue_if_stopped();
  child.let_it_run();
  EXPECT_TRUE(wait_until([&] { return child.is_stopped(); }));
}

}  // namespace
}  // namespace cadre::os
