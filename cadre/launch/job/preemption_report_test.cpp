#include "cadre/launch/job/preemption_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

namespace cadre::launch {
namespace {

LeavingWorker saved(int rank, int64_t step, int code = 75) {
  return {.exit = {.rank = rank,
                   .status = {.code = code},
                   .preemption = PreemptionFile{.saved_step = step, .exit_code = code}},
          .has_asked = true};
}

LeavingWorker killed(int rank, bool has_asked) {
  return {.exit = {.rank = rank, .status = {.signal = SIGKILL}}, .has_asked = has_asked};
}

PreemptionReport report_of(const std::vector<LeavingWorker>& workers, int signal = 0) {
  return {.signal = signal, .workers = workers};
}

TEST(PreemptionReport, SaysWhatAllRanksSaved) {
  const std::vector<LeavingWorker> workers{saved(1, 12), saved(0, 12)};
  const PreemptionReport report = report_of(workers, SIGUSR1);
  EXPECT_TRUE(report.has_begun());
  EXPECT_EQ(report.saved_by_all(), workers[0].exit.preemption);
  EXPECT_EQ(report.to_text(),
            "preempted by SIGUSR1, saved at step 12 by all 2 ranks; exit code 75 asks for another "
            "run");
  EXPECT_EQ(report_of({workers[0]}).to_text(),
            "preempted, saved at step 12 by 1 rank; exit code 75 asks for another run");
}

TEST(PreemptionReport, NamesTheRanksThatDidNotSave) {
  const std::vector<LeavingWorker> workers{killed(3, false), killed(2, true), saved(0, 12),
                                           saved(1, 12), killed(4, true)};
  const PreemptionReport report = report_of(workers, SIGTERM);
  EXPECT_TRUE(report.has_begun());
  EXPECT_EQ(report.saved_by_all(), std::nullopt);
  EXPECT_EQ(report.to_text(),
            "preempted by SIGTERM, but no step was saved by all ranks: ranks 2, 4 called "
            "Preemption::must_leave(), and saved no snapshot, ended with signal 9 (SIGKILL); rank "
            "3 did not call Preemption::must_leave(), ended with signal 9 (SIGKILL); ranks 0-1 "
            "saved step "
            "12, ended with exit code 75");
}

TEST(PreemptionReport, DifferentStepsOrCodesAreNoCommonSnapshot) {
  EXPECT_EQ(report_of({saved(0, 12), saved(1, 13)}).saved_by_all(), std::nullopt);
  EXPECT_EQ(report_of({saved(0, 12), saved(1, 12, 76)}).saved_by_all(), std::nullopt);
  const std::vector<LeavingWorker> workers{saved(0, 12), saved(1, 13)};
  EXPECT_EQ(report_of(workers).to_text(),
            "preempted, but no step was saved by all ranks: rank 0 saved step 12, ended with "
            "exit code 75; rank 1 saved step 13, ended with exit code 75");
  const std::vector<LeavingWorker> codes{saved(0, 12), saved(1, 12, 76)};
  EXPECT_EQ(report_of(codes).to_text(),
            "preempted, but no step was saved by all ranks: rank 0 saved step 12, ended with "
            "exit code 75; rank 1 saved step 12, ended with exit code 76");
}

TEST(PreemptionReport, AWorkerThatCouldNotBeKilledHasSavedNothing) {
  const std::vector<LeavingWorker> workers{
      saved(0, 12), {.exit = {.rank = 1}, .has_asked = true, .has_ended = false}};
  const PreemptionReport report = report_of(workers);
  EXPECT_TRUE(report.has_begun());
  EXPECT_EQ(report.saved_by_all(), std::nullopt);
  EXPECT_EQ(report.to_text(),
            "preempted, but no step was saved by all ranks: rank 1 called "
            "Preemption::must_leave(), and saved no snapshot, did not end; rank 0 saved step 12, "
            "ended with exit code 75");
  const std::vector<LeavingWorker> done{
      {.exit = {.rank = 0}, .has_asked = true},
      {.exit = {.rank = 1}, .has_asked = true, .has_ended = false}};
  EXPECT_TRUE(report_of(done).has_begun());
}

TEST(PreemptionReport, ThereIsNoneWithoutAnAskingRankOrAfterSuccess) {
  const std::vector<LeavingWorker> killed_ones{killed(0, false), killed(1, false)};
  EXPECT_FALSE(report_of(killed_ones).has_begun());
  const std::vector<LeavingWorker> done{{.exit = {.rank = 0}, .has_asked = true}};
  EXPECT_FALSE(report_of(done).has_begun());
}

}  // namespace
}  // namespace cadre::launch
