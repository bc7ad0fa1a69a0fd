#include "cadre/launch/job/restarts.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <vector>

namespace cadre::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(RestartPolicy, CountsToTheMaximum) {
  RestartPolicy policy(2);
  EXPECT_TRUE(policy.has_restart_left());
  policy.next_delay(seconds(1));
  EXPECT_TRUE(policy.has_restart_left());
  policy.next_delay(seconds(1));
  EXPECT_FALSE(policy.has_restart_left());
  EXPECT_EQ(policy.num_restarts(), 2);
  EXPECT_FALSE(RestartPolicy(0).has_restart_left());
}

TEST(RestartPolicy, DelaysOnlyFailuresThatComeSoonOneAfterTheOther) {
  RestartPolicy policy(100);
  EXPECT_EQ(policy.next_delay(seconds(1)), milliseconds(0));
  EXPECT_EQ(policy.next_delay(seconds(9)), milliseconds(100));
  EXPECT_EQ(policy.next_delay(seconds(0)), milliseconds(200));
  EXPECT_EQ(policy.next_delay(seconds(0)), milliseconds(400));
  EXPECT_EQ(policy.next_delay(seconds(10)), milliseconds(0));
  EXPECT_EQ(policy.next_delay(seconds(1)), milliseconds(0));
  EXPECT_EQ(policy.next_delay(seconds(1)), milliseconds(100));
  for (int restart = 0; restart < 20; ++restart) policy.next_delay(seconds(0));
  EXPECT_EQ(policy.next_delay(seconds(0)), seconds(5));
}

WorkerExit failure_of(int rank, os::ExitStatus status) {
  return {.rank = rank, .pid = 1000, .status = status, .lifetime = milliseconds(1200)};
}

TEST(FailuresText, ListsRankStatusAndTime) {
  EXPECT_EQ(failures_text({}), "");
  EXPECT_EQ(
      failures_text(std::vector{failure_of(0, {.signal = SIGKILL}), failure_of(2, {.code = 3})}),
      "rank 0: signal 9 (SIGKILL) after 1.2 s; rank 2: exit code 3 after 1.2 s");
}

TEST(FailuresText, ListsTheLastOnesOfMany) {
  std::vector<WorkerExit> failures;
  for (int rank = 0; rank < 7; ++rank) failures.push_back(failure_of(rank, {.code = 1}));
  EXPECT_EQ(
      failures_text(failures),
      "2 not listed; rank 2: exit code 1 after 1.2 s; rank 3: exit code 1 after 1.2 s; rank "
      "4: exit code 1 after 1.2 s; rank 5: exit code 1 after 1.2 s; rank 6: exit code 1 after "
      "1.2 s");
}

}  // namespace
}  // namespace cadre::launch
