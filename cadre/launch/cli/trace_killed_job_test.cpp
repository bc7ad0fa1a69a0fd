// Tests a job that hangs and whose processes are then all killed: the output of `cadre trace`
// before and afterwards. No process may be left.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "cadre/core/comm/connect.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kNumRanks = 3;
// The rank that does not call the all_reduce in which the others wait.
constexpr int kIdler = 2;

// This test is the program of the workers that the test below starts with `cadre run`. If it is run
// directly, the group has one rank.
TEST(TraceKilledJobWorker, Sums) {
  const auto system = os::make_native_system();
  const auto group = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  group->barrier();
  if (group->rank() == kIdler) system->poll({}, system->deadline_in(kPatience));
  std::vector<float> data(1024, 1);
  const Bytes bytes = std::as_writable_bytes(std::span(data));
  group->all_reduce(bytes, bytes, DType::kFloat32, ReduceOp::kSum);
}

std::vector<std::string> hanging_job(const std::string& records) {
  return {"run",
          "--nproc-per-node",
          cadre::format("{}", kNumRanks),
          "--flight-records",
          records,
          "--no-python",
          std::filesystem::read_symlink("/proc/self/exe").string(),
          "--gtest_filter=TraceKilledJobWorker.Sums"};
}

std::string trace_of(const std::string& records) {
  return run_cadre({"trace", records}).output;
}

// Waits until all ranks except the idle one have entered the all_reduce.
bool waits_for_idler(os::System& system, const std::string& records) {
  const Deadline deadline = system.deadline_in(kPatience);
  const std::string waiting = "was still in it after ";
  while (!deadline.has_passed(system.now())) {
    const std::string text = trace_of(records);
    const size_t first = text.find(waiting);
    if (text.find("stopped at #2 all_reduce") != std::string::npos && first != text.npos &&
        text.find(waiting, first + 1) != text.npos) {
      return true;
    }
    system.poll({}, system.deadline_in(std::chrono::milliseconds(20)));
  }
  return false;
}

std::vector<int> pids_in(const std::string& records) {
  const auto json = nlohmann::json::parse(run_cadre({"trace", "--json", records}).output);
  std::vector<int> pids;
  for (const auto& record : json.at(0).at("records")) pids.push_back(record.at("pid"));
  return pids;
}

TEST(TraceKilledJob, TheRecordsNameTheOperationBeforeAndAfterTheDeathOfAllRanks) {
  const auto system = os::make_native_system();
  const cadre::testing::TemporaryFolder folder;
  const std::string records = folder.file("records");
  const cadre::testing::Resources before = cadre::testing::count_resources();
  {
    CadreCommand command(hanging_job(records));
    ASSERT_TRUE(waits_for_idler(*system, records)) << trace_of(records);
    EXPECT_THAT(trace_of(records),
                ContainsRegex("owes +rank 2 .*last seen after barrier #1, .* ago"));
    const std::vector<int> pids = pids_in(records);
    ASSERT_EQ(pids.size(), static_cast<size_t>(kNumRanks));
    // All processes are stopped before they are killed, so that no process detects the death of
    // another one.
    for (const int signal : {SIGSTOP, SIGKILL}) {
      for (const int pid : pids) ::kill(pid, signal);
    }
    const auto result = command.wait();
    EXPECT_EQ(result.exit_code, 128 + SIGKILL);
    EXPECT_THAT(result.error, ContainsRegex("rank [0-2] of 3 failed with signal 9 \\(SIGKILL\\)"));
    EXPECT_TRUE(command.leaves_nothing());
  }
  const std::string text = trace_of(records);
  EXPECT_THAT(text, HasSubstr("stopped at #2 all_reduce(sum, float32 x 1024)\n"));
  EXPECT_THAT(text, ContainsRegex("waited +rank 0 .*: was in it when its record ends\n"));
  EXPECT_THAT(text, ContainsRegex("waited +rank 1 .*: was in it when its record ends\n"));
  EXPECT_THAT(text, ContainsRegex("owes +rank 2 .*: did not call it: last seen after barrier #1, "
                                  ".* before the records end\n"));
  EXPECT_EQ(cadre::testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre::cli
