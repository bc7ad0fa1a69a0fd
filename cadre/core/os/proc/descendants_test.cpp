#include "cadre/core/os/proc/descendants.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

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

}  // namespace
}  // namespace cadre::os
