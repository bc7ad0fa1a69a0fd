// Tests `cadre` under the name of torchrun, and --dry-run.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Starts `cadre` through a link with the name of torchrun.
class RunTorchrunLink : public ::testing::Test {
 protected:
  RunTorchrunLink() {
    std::filesystem::create_symlink(testing::build_path("bin/cadre"), folder_.file("torchrun"));
    std::ofstream(folder_.file("program")) << "import os, sys\n"
                                              "print(os.environ['RANK'], sys.argv[1])\n";
  }
  CommandResult torchrun(std::vector<std::string> words) {
    return CadreCommand(std::move(words),
                        {.shell = "shift; exec " + folder_.file("torchrun") + " \"$@\""})
        .wait();
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(RunTorchrunLink, RunsAnyFileByPythonAndShowsLinesWithoutPrefix) {
  const auto result = torchrun({"--nproc_per_node=1", folder_.file("program"), "-x"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "0 -x\n");
}

TEST_F(RunTorchrunLink, ExecutesAProgramWithNoPython) {
  const auto result = torchrun({"--no-python", "sh", "-c", "echo $WORLD_SIZE"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "1\n");
}

TEST_F(RunTorchrunLink, TeedLinesHaveTorchrunsPrefix) {
  const auto result =
      torchrun({"--tee", "1", "--log-dir", folder_.file("logs"), folder_.file("program"), "a"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[default0]:0 a\n");
}

TEST_F(RunTorchrunLink, NamesItselfInItsErrors) {
  const auto result = torchrun({"--nnodes", "x", "program"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.error, StartsWith("torchrun: --nnodes x: "));
}

TEST(RunDryRun, PrintsWhatWouldBeStartedAndStartsNothing) {
  const testing::TemporaryFolder folder;
  const auto result =
      run_cadre({"run", "--dry-run", "--nproc-per-node", "2", "--log-dir", folder.file("logs"),
                 "-r3", "touch", folder.file("ran-${local_rank}")});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  EXPECT_THAT(result.output, HasSubstr("touch\nworkers: 2\nlog files: " + folder.file("logs/")));
  EXPECT_THAT(result.output, HasSubstr("rank 1: touch " + folder.file("ran-1") + "\n"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RunDryRun, AnUnknownProgramIsAnError) {
  EXPECT_EQ(run_cadre({"run", "--dry-run", "/no/such/program"}).exit_code, 127);
}

}  // namespace
}  // namespace cadre::cli
