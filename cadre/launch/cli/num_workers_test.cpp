// Tests `--nproc-per-node auto | gpu | cpu`, on simulated machines with and without GPUs, and on
// this machine.
#include <gmock/gmock.h>

#include "cadre/launch/cli/run_options.h"
#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

std::string workers(const std::string& value, const os::MachineInfo& machine) {
  const auto count = num_workers_of(
      {.name = "--nproc-per-node", .spelling = "--nproc-per-node", .value = value}, machine);
  return count.ok() ? cadre::format("{}", *count) : count.error().message();
}

TEST(NumWorkers, AreAsManyAsGpusOrCores) {
  const os::MachineInfo with_gpus = {.num_cores = 12, .num_gpus = 3};
  EXPECT_EQ(workers("auto", with_gpus), "3");
  EXPECT_EQ(workers("gpu", with_gpus), "3");
  EXPECT_EQ(workers("cpu", with_gpus), "12");
  const os::MachineInfo without = {.num_cores = 12, .num_gpus = 0};
  EXPECT_EQ(workers("auto", without), "12");
  EXPECT_EQ(workers("cpu", without), "12");
  EXPECT_EQ(workers("gpu", without),
            "--nproc-per-node gpu: this machine has no GPU; pass auto or a number");
}

TEST(NumWorkers, RefuseWhatIsNoNumberOfThem) {
  for (const char* value : {"", "0", "-1", "4097", "2.0", " 2", "GPU", "xpu", "99999999999"}) {
    EXPECT_THAT(workers(value, {}), ::testing::HasSubstr("expected a number from 1 to 4096"))
        << value;
  }
}

TEST(NumWorkers, OnOneCoreCpuIsOneWorker) {
  for (const char* value : {"cpu", "auto"}) {
    const auto result =
        CadreCommand(
            {"run", "--nproc-per-node", value, "sh", "-c", "echo $WORLD_SIZE"},
            {.environment = {{"CUDA_VISIBLE_DEVICES", ""}}, .shell = "exec taskset -c 0 \"$@\""})
            .wait();
    EXPECT_EQ(result.output, "[0] 1\n") << value << result.error;
  }
  const auto none =
      run_cadre({"run", "--nproc-per-node=gpu", "true"}, {{"CUDA_VISIBLE_DEVICES", ""}});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_EQ(none.error,
            "cadre run: --nproc-per-node gpu: this machine has no GPU; pass auto or a number\n");
}

}  // namespace
}  // namespace cadre::cli
