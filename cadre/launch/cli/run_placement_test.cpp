// Tests on which cores and GPUs `cadre run` places the workers.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "cadre/launch/cli/binding/core_binding.h"
#include "cadre/launch/job/failure_report.h"
#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> virtual_job(int num_workers) {
  return {"run",
          "--nproc-per-node",
          std::to_string(num_workers),
          "--virtual-local-rank",
          "sh",
          "-c",
          "echo $RANK: $LOCAL_RANK $CUDA_VISIBLE_DEVICES"};
}

TEST(RunPlacement, AVirtualLocalRankIsZeroAndSeesOneGpu) {
  const auto result = run_cadre(virtual_job(2), {{"CUDA_VISIBLE_DEVICES", "5,7"}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[0] 0: 0 5\n"));
  EXPECT_THAT(result.output, HasSubstr("[1] 1: 0 7\n"));
}

TEST(RunPlacement, MoreVirtualLocalRanksThanGpusAreRefused) {
  const auto result = run_cadre(virtual_job(3), {{"CUDA_VISIBLE_DEVICES", "5,7"}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.error,
            "cadre run: --virtual-local-rank: CUDA_VISIBLE_DEVICES=5,7 has 2 entries, so there is "
            "no GPU for local rank 2; start fewer workers or add GPUs to the variable\n");
}

// Each worker of an exclusive binding has cores of its own. Needs two physical cores.
TEST(RunPlacement, BindsEachWorkerToCoresOfItsOwn) {
  const auto topology = Topology::of_this_machine();
  ASSERT_TRUE(topology.ok()) << topology.error().message();
  const auto expected = bind_workers(*topology, BindingMode::kExclusive, 2, {});
  if (!expected.ok()) GTEST_SKIP() << expected.error().message();
  const auto result =
      run_cadre({"run", "--nproc-per-node", "2", "--numa-binding", "exclusive", "sh", "-c",
                 "grep Cpus_allowed_list /proc/self/status; echo threads $OMP_NUM_THREADS"},
                {{"CADRE_LOG", "info"}, {"CUDA_VISIBLE_DEVICES", ""}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (size_t rank = 0; rank < 2; ++rank) {
    std::vector<int> cores = (*expected)[rank];
    const std::string text = launch::rank_ranges(cores);
    EXPECT_THAT(result.error,
                HasSubstr(cadre::format("rank {} is bound to cores {}\n", rank, text)));
    if (cores.size() > 1) continue;  // the kernel writes lists in another way
    EXPECT_THAT(result.output,
                HasSubstr(cadre::format("[{}] Cpus_allowed_list:\t{}\n", rank, text)));
    EXPECT_THAT(result.output, HasSubstr(cadre::format("[{}] threads 1\n", rank)));
  }
}

TEST(RunPlacement, ABindingWithoutEffectIsLoggedAtInfo) {
  const auto run = [](const char* level) {
    return run_cadre({"run", "--numa-binding", "exclusive", "true"},
                     {{"CADRE_LOG", level}, {"CUDA_VISIBLE_DEVICES", ""}});
  };
  const auto topology = Topology::of_this_machine();
  ASSERT_TRUE(topology.ok());
  if (topology->nodes().size() != 1) GTEST_SKIP() << "this machine has several NUMA nodes";
  EXPECT_THAT(run("info").error, HasSubstr("cadre: --numa-binding has no effect: "));
  EXPECT_EQ(run("warning").error, "");
}

}  // namespace
}  // namespace cadre::cli
